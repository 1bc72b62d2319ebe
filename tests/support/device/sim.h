// An accelerator that runs on the host and is as strict as a GPU is; `__init__.py` says what for.
//
//   device.cpp       memory, streams and events, random numbers, and their registration with torch
//   kernels.cpp      operators: copies, views, and every other one by torch's own kernel for the host
//   collectives.cpp  a process group that takes tensors of the device alone
//   module.cpp       what Python sees
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
constexpr int kPoison = 0xFF;  // every floating point type reads it as not a number

// ---- memory

// The allocator of device memory. The host may not touch the addresses that it gives: it is killed for it.
c10::Allocator& device_memory();

// A tensor of the host on the memory of a tensor of the device; others are returned as they are.
at::Tensor on_host(const at::Tensor& tensor);

void resize_storage(c10::StorageImpl& storage, size_t bytes);

bool is_pinned(const void* address);
size_t pinned_bytes();
int64_t pinned_allocations();

// ---- order: what was asked of a stream and is not done yet

enum class Until {
  kernel,       // done before the next kernel of its device runs: a stream that waits for a collective
  synchronised  // done when the host has waited for it: a copy to pinned memory
};

void enqueue(const c10::Stream& stream, Until until, std::function<void()> task);
void finish_before_kernel(c10::DeviceIndex device);
void finish(const c10::Stream& stream);

// ---- observation

// Kernels of this thread are no concern of the user's: nothing of what they do counts as a wait.
struct InKernel {
  InKernel();
  ~InKernel();
  static bool is_one_running();
};

// Tells Python, if it listens: the host waits for the device, or does what a GPU would get wrong.
void report(const std::string& kind, const std::string& what);

// Where Python is now, if it listens.
std::string place();

// ---- devices and random numbers

c10::Device current_device();
void set_device(c10::DeviceIndex index);
c10::DeviceIndex device_count();
c10::Stream current_stream(c10::Device device);
at::Generator default_generator(c10::DeviceIndex index);

// The generator of the host that numbers of a generator of the device come from.
at::Generator host_generator(const at::Generator& generator);

}  // namespace sim
