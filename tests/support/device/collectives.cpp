// A process group of the device: it takes contiguous tensors of the device alone, and gloo exchanges copies of them.
#include "collectives.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <mutex>
#include <thread>

namespace sim {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using c10d::Backend, c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Future = c10::ivalue::Future;
using Begun = std::pair<WorkPtr, std::function<void()>>;  // what gloo does, and how its results are delivered

// One collective. Its results are on the device once it was waited for, or told by its future.
struct Exchange final : Work {
  Exchange(WorkPtr exchanged, Tensors outputs, std::function<void()> deliver, bool blocks_host)
      : exchanged(std::move(exchanged)),
        outputs(std::move(outputs)),
        deliver(std::move(deliver)),
        blocks_host(blocks_host) {}

  WorkPtr exchanged;
  Tensors outputs;
  std::function<void()> deliver;
  bool blocks_host;
  std::once_flag delivered;

  bool isCompleted() override { return exchanged->isCompleted(); }
  bool isSuccess() const override { return exchanged->isSuccess(); }
  std::exception_ptr exception() const override { return exchanged->exception(); }
  Tensors result() override { return outputs; }

  void deliver_once() {
    std::call_once(delivered, [this] {
      InKernel quiet;
      deliver();
    });
  }

  void finish_exchange(std::chrono::milliseconds timeout) {
    exchanged->wait(timeout);
    deliver_once();
  }

  // As with NCCL: the stream waits, for ever if a rank is lost, and the host goes on until it needs the stream.
  void block_stream() {
    auto self = c10::intrusive_ptr<Exchange>::reclaim_copy(this);
    enqueue(current_stream(current_device()), Until::kernel, [self] {
      try {
        self->finish_exchange(kNoTimeout);
      } catch (const std::exception&) {
        while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
      }
    });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (blocks_host) {
      finish_exchange(timeout);
    } else {
      block_stream();
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

  c10::intrusive_ptr<Future> getFuture() override {
    const auto device = outputs.empty() ? current_device() : outputs[0].device();
    auto future = c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::vector<at::Device>{device});
    if (!blocks_host) {
      block_stream();
      future->markCompleted(c10::IValue(outputs));
      return future;
    }
    auto self = c10::intrusive_ptr<Exchange>::reclaim_copy(this);
    exchanged->getFuture()->addCallback([self, future](Future& done) {
      if (done.hasError()) return future->setError(done.exception_ptr());
      self->deliver_once();
      future->markCompleted(c10::IValue(self->outputs));
    });
    return future;
  }
};

Tensor host_copy(const Tensor& tensor) { return on_host(tensor).clone(); }
Tensor host_empty(const Tensor& tensor) { return at::empty(tensor.sizes(), tensor.options().device(at::kCPU)); }

template <typename Copy>
Tensors each_of(const Tensors& tensors, Copy copy) {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(copy(tensor));
  return copies;
}

void deliver_all(const Tensors& from, const Tensors& to) {
  for (size_t i = 0; i < to.size(); ++i) on_host(to[i]).copy_(from[i].view(to[i].sizes()));
}

// All of `tensors` in one, on the host; those of half precision are added up in single precision.
Tensor flat_summands(const Tensors& tensors) {
  const auto type = tensors.at(0).scalar_type();
  const auto parts = each_of(tensors, [](const Tensor& tensor) { return on_host(tensor).flatten(); });
  return at::cat(parts).to(at::isReducedFloatingType(type) ? at::kFloat : type);
}

// Gloo adds up; the average is taken afterwards.
template <typename Options>
Options as_sum(Options options) {
  if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
  return options;
}

void deliver_sums(const Tensor& sums, const c10d::ReduceOp& asked, int ranks, const Tensors& to) {
  const auto result = asked == c10d::ReduceOp::AVG ? sums / ranks : sums;
  int64_t begin = 0;
  for (const auto& tensor : to) {
    on_host(tensor).copy_(result.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

struct Collectives final : Backend {
  Collectives(c10::intrusive_ptr<Backend> gloo, bool blocks_host)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)), blocks_host(blocks_host) {}

  c10::intrusive_ptr<Backend> gloo;
  bool blocks_host;

  const std::string getBackendName() const override { return "simccl"; }

  // Checks, waits for what the device has to do before, and starts. `begin` returns the work and what it delivers.
  template <typename Begin>
  WorkPtr exchange(const char* name, const Tensors& inputs, const Tensors& outputs, Begin begin) {
    for (const auto* tensors : {&inputs, &outputs}) {
      for (const auto& tensor : *tensors) {
        TORCH_CHECK(tensor.device().type() == kSim, "No backend type associated with device type ",
                    tensor.device().type(), ": simccl's ", name, " takes tensors of the sim device");
        TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous in simccl's ", name);
      }
    }
    finish_before_kernel(current_device().index());
    InKernel quiet;
    auto [work, deliver] = begin();
    return c10::make_intrusive<Exchange>(std::move(work), outputs, std::move(deliver), blocks_host);
  }


  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return exchange("allreduce", tensors, tensors, [&]() -> Begun {
      Tensors sums{flat_summands(tensors)};
      auto work = gloo->allreduce(sums, as_sum(options));
      return {work, [=, this, to = tensors, asked = options.reduceOp] { deliver_sums(sums[0], asked, getSize(), to); }};
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return exchange("reduce", tensors, tensors, [&]() -> Begun {
      Tensors sums{flat_summands(tensors)};
      auto work = gloo->reduce(sums, as_sum(options));
      auto to = options.rootRank == getRank() ? tensors : Tensors();
      return {work, [=, this, asked = options.reduceOp] { deliver_sums(sums[0], asked, getSize(), to); }};
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return exchange("broadcast", tensors, tensors, [&]() -> Begun {
      auto copies = each_of(tensors, host_copy);
      auto work = gloo->broadcast(copies, options);
      return {work, [copies, to = tensors] { deliver_all(copies, to); }};
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return exchange("allgather", inputs, outputs.at(0), [&]() -> Begun {
      auto copies = each_of(inputs, host_copy);
      std::vector<Tensors> gathered{each_of(outputs[0], host_empty)};
      auto work = gloo->allgather(gathered, copies, options);
      return {work, [from = gathered[0], to = outputs[0]] { deliver_all(from, to); }};
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> parts{output.chunk(getSize())};
    Tensors inputs{input};
    return allgather(parts, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return one_by_one(outputs, inputs, [&](Tensor& out, Tensor& in) { return _allgather_base(out, in, options); });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return exchange("reduce_scatter", inputs.at(0), outputs, [&]() -> Begun {
      Tensors sums{flat_summands(inputs[0])};
      c10d::AllreduceOptions all;
      all.reduceOp = options.reduceOp;
      auto work = gloo->allreduce(sums, as_sum(all));
      return {work, [=, this, to = outputs, asked = options.reduceOp] {
                deliver_sums(sums[0].chunk(getSize()).at(getRank()), asked, getSize(), to);
              }};
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output};
    std::vector<Tensors> parts{input.chunk(getSize())};
    return reduce_scatter(outputs, parts, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return one_by_one(outputs, inputs, [&](Tensor& out, Tensor& in) { return _reduce_scatter_base(out, in, options); });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto to = outputs.empty() ? Tensors() : outputs[0];
    return exchange("gather", inputs, to, [&]() -> Begun {
      auto copies = each_of(inputs, host_copy);
      std::vector<Tensors> gathered;
      if (!to.empty()) gathered.push_back(each_of(to, host_empty));
      auto work = gloo->gather(gathered, copies, options);
      return {work, [from = gathered.empty() ? Tensors() : gathered[0], to] { deliver_all(from, to); }};
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const auto from = inputs.empty() ? Tensors() : inputs[0];
    return exchange("scatter", from, outputs, [&]() -> Begun {
      auto received = each_of(outputs, host_empty);
      std::vector<Tensors> copies;
      if (!from.empty()) copies.push_back(each_of(from, host_copy));
      auto work = gloo->scatter(received, copies, options);
      return {work, [received, to = outputs] { deliver_all(received, to); }};
    });
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    return exchange("send", tensors, {}, [&]() -> Begun {
      auto copies = each_of(tensors, host_copy);
      return {gloo->send(copies, rank, tag), [copies] {}};
    });
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return exchange("recv", {}, tensors, [&]() -> Begun {
      auto received = each_of(tensors, host_empty);
      return {gloo->recv(received, rank, tag), [received, to = tensors] { deliver_all(received, to); }};
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    report("barrier", "");
    auto work = gloo->barrier(options);
    work->wait();
    return work;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  template <typename One>
  WorkPtr one_by_one(Tensors& outputs, Tensors& inputs, One one) {
    WorkPtr last;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (last) last->wait();
      last = one(outputs[i], inputs[i]);
    }
    return last;
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> collectives(c10::intrusive_ptr<c10d::Backend> gloo, bool blocks_host) {
  return c10::make_intrusive<Collectives>(std::move(gloo), blocks_host);
}

}  // namespace sim
