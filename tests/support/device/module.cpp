// What Python sees.
#include "collectives.h"

#include <ATen/core/Generator.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace sim {
namespace {

// Never freed: threads of torch may report while Python ends.
PyObject* listener = nullptr;
PyObject* stack_reader = nullptr;

}  // namespace

void report(const std::string& kind, const std::string& what) {
  if (listener == nullptr || (InKernel::is_one_running() && kind != "race")) return;
  py::gil_scoped_acquire gil;
  py::handle{listener}(kind, what);
}

std::string place() {
  if (stack_reader == nullptr) return "";
  py::gil_scoped_acquire gil;
  return py::handle{stack_reader}().cast<std::string>();
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &sim::device_count);
  m.def("current_device", [] { return sim::current_device().index(); });
  m.def("set_device", &sim::set_device);
  m.def("default_generator", &sim::default_generator);
  m.def("pinned_bytes", &sim::pinned_bytes);
  m.def("pinned_allocations", &sim::pinned_allocations);
  m.def("collectives", &sim::collectives);
  m.def("listen", [](py::object told, py::object place) {
    sim::listener = told.is_none() ? nullptr : told.release().ptr();
    sim::stack_reader = place.is_none() ? nullptr : place.release().ptr();
  });
}
