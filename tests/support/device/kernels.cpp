// Operators: what makes, copies and views tensors of the device; torch's kernels for the host do all the others.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using Stack = torch::jit::Stack;

thread_local int kernels_of_thread = 0;

// ---- making tensors

at::Device device_or_current(std::optional<at::Device> device) {
  return device.has_value() && device->has_index() ? *device : current_device();
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(sizes, &device_memory(), kKeys, c10::dtype_or_default(type), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory(), kKeys, c10::dtype_or_default(type));
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = (impl->storage_offset() + tensor.numel()) * tensor.itemsize();
  if (bytes > tensor.storage().nbytes()) resize_storage(*tensor.storage().unsafeGetStorageImpl(), bytes);
  return tensor;
}

// ---- copies, the only way in and out

uint64_t checksum(const Tensor& tensor) {
  const auto bytes = tensor.contiguous();
  const auto* begin = static_cast<const char*>(bytes.const_data_ptr());
  return std::hash<std::string_view>{}({begin, bytes.nbytes()});
}

// The device reads the source later; what the host writes there meanwhile is what it may read.
void watch_source(const Tensor& source, const c10::Stream& stream) {
  enqueue(stream, Until::synchronised, [source, before = checksum(source), begun = place()] {
    const bool has_changed = checksum(source) != before;
    if (has_changed) report("race", "a pinned source changed before its copy was done, begun at " + begun);
  });
}

// The target is there once the host has waited for it.
Tensor copy_late(const Tensor& source, const Tensor& target, const c10::Stream& stream) {
  InKernel quiet;
  const auto arrives = on_host(source).clone();
  if (target.is_non_overlapping_and_dense()) std::memset(target.mutable_data_ptr(), kPoison, target.nbytes());
  enqueue(stream, Until::synchronised, [arrives, target] { target.copy_(arrives); });
  return target;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool leaves = source.device().type() == kSim, enters = target.device().type() == kSim;
  const auto stream = current_stream(leaves ? source.device() : target.device());
  finish_before_kernel(stream.device_index());
  if (leaves != enters && !InKernel::is_one_running()) {
    const bool is_late = non_blocking && is_pinned((leaves ? target : source).const_data_ptr());
    if (is_late && leaves) return copy_late(source, target, stream);
    if (is_late) {
      watch_source(source, stream);
    } else {
      report(leaves ? "copy to host" : "copy to device", c10::str(source.sizes()));
      finish(stream);
    }
  }
  InKernel quiet;
  on_host(target).copy_(on_host(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const Tensor& tensor) {
  report("item", "");
  finish_before_kernel(tensor.device().index());
  finish(current_stream(tensor.device()));
  InKernel quiet;
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

// ---- every other operator

bool is_on_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The device of an operator; as on a GPU, only single numbers and lists of indices may come from elsewhere.
at::Device device_of(const std::string& name, at::ArrayRef<c10::IValue> arguments) {
  std::vector<Tensor> tensors;
  for (const auto& each : arguments) {
    if (each.isTensor()) tensors.push_back(each.toTensor());
    if (each.isTensorList()) {
      for (const Tensor& tensor : each.toTensorVector()) tensors.push_back(tensor);
    }
  }
  const auto first = std::find_if(tensors.begin(), tensors.end(), is_on_sim);
  if (first == tensors.end() && !tensors.empty()) return tensors[0].device();
  const auto device = first == tensors.end() ? current_device() : first->device();
  for (const auto& each : tensors) {
    const bool fits = !each.defined() || each.device() == device || (each.device().is_cpu() && each.dim() == 0);
    TORCH_CHECK(fits, "Expected all tensors to be on the same device, but ", name, " has some on ", device, " and ",
                each.device());
  }
  return device;
}

// Numbers are drawn by the host's part of the device's generator.
void give_generator(const c10::FunctionSchema& schema, at::Device device, Stack& stack) {
  const size_t arguments = schema.arguments().size();
  for (size_t i = 0; i < arguments; ++i) {
    auto& value = torch::jit::peek(stack, i, arguments);
    if (value.isGenerator()) value = host_generator(value.toGenerator());
    const bool unset = value.isNone() && schema.arguments()[i].type()->str().find("Generator") == 0;
    if (unset) value = host_generator(default_generator(device.index()));
  }
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto device = device_of(schema.name(), torch::jit::last(*stack, schema.arguments().size()));
  TORCH_CHECK(device.type() == kSim, schema.name(), " got a tensor of the host and indices on the device");
  c10::DeviceGuard guard(device);
  finish_before_kernel(device.index());
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
    report("operator", schema.name());
  }
  give_generator(schema, device, *stack);
  InKernel quiet;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// ---- what torch leaves to each device

// Convolutions have other names there, the backward one also an argument less: the sizes of the bias.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  run_on_host(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto first = stack->end() - op.schema().arguments().size();
  stack->insert(first + 3, c10::IValue(c10::List<int64_t>({first->toTensor().size(1)})));
  run_on_host(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

Tensor plus(const Tensor& tensor, const std::optional<Tensor>& bias) {
  return bias.has_value() && bias->defined() ? tensor + *bias : tensor;
}

// Recurrent cells, of operators that autograd knows.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  const auto gates = plus(input, input_bias) + plus(hidden, hidden_bias);
  const auto parts = gates.chunk(4, 1);
  const auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                    const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  const auto from_input = plus(input, input_bias).chunk(3, 1);
  const auto from_hidden = plus(hidden, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  const auto update = (from_input[1] + from_hidden[1]).sigmoid();
  const auto proposed = (from_input[2] + reset * from_hidden[2]).tanh();
  return {proposed + update * (state - proposed), update};
}

// Its declaration does not say that it writes running statistics; that of the operator which it is says so.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias,
                                              const std::optional<Tensor>& running_mean,
                                              const std::optional<Tensor>& running_variance, bool training,
                                              double momentum, double epsilon) {
  if (!running_mean.has_value() || !running_mean->defined()) {
    return at::_native_batch_norm_legit(input, weight, bias, training, momentum, epsilon);
  }
  Tensor mean = *running_mean, variance = *running_variance;
  return at::_native_batch_norm_legit(input, weight, bias, mean, variance, training, momentum, epsilon);
}

// The host's kernel takes no generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  const auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {p == 1 ? input * mask : input * mask * (1 / (1 - p)), mask};
}

// Copies read conjugated and negated views as such; what resolves them for other operators is a copy itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("native_dropout", &dropout);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("record_stream", [](Tensor&, at::Stream) {});
  // A parameter keeps being the same one when its module moves to the device.
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
  // Views read no memory.
  m.impl("view", [](const Tensor& t, at::IntArrayRef sizes) { return at::native::view(t, sizes); });
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", [](const Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
    return at::native::_reshape_alias(t, sizes, strides);
  });
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", [](Tensor& t, at::Storage source) -> Tensor& { return at::native::set_(t, source); });
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

// ---- autocast: torch's own lists of what runs in which precision

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace

InKernel::InKernel() { kernels_of_thread += 1; }
InKernel::~InKernel() { kernels_of_thread -= 1; }
bool InKernel::is_one_running() { return kernels_of_thread > 0; }

}  // namespace sim
