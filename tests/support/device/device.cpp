// Memory, streams and events, random numbers, and their registration with torch.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace sim {
namespace {

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

std::recursive_mutex state;  // guards everything below; freeing a tensor inside of a task takes it again
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- device memory: one file, mapped twice

constexpr size_t kArena = size_t{64} << 30;  // address space; pages take memory once they are written
constexpr size_t kAlignment = 512;

char* locked = nullptr;  // the addresses that tensors have; nobody may read or write there
char* open = nullptr;    // the same pages, as copies and kernels reach them
size_t used = 0;
pid_t owner = 0;

struct Block {
  size_t bytes;
  DeviceIndex device;
};
std::map<char*, Block> blocks;
std::map<size_t, std::vector<char*>> free_blocks;  // by size
std::map<DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> statistics;

void map_arena() {
  if (locked != nullptr) {
    TORCH_CHECK(owner == getpid(), "The sim device cannot be used in a forked process; start one anew.");
    return;
  }
  const int file = memfd_create("sim", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory for the sim device");
  auto map = [&](int protection) {
    void* address = mmap(nullptr, kArena, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(address != MAP_FAILED, "no address space for the sim device");
    return static_cast<char*>(address);
  };
  locked = map(PROT_NONE);
  open = map(PROT_READ | PROT_WRITE);
  close(file);
  owner = getpid();
}

char* opened(const void* address) {
  return address == nullptr ? nullptr : open + (static_cast<const char*>(address) - locked);
}

void count(DeviceIndex device, size_t bytes, bool taken) {
  auto& numbers = statistics[device];
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  for (auto* each : {&numbers.allocated_bytes[all], &numbers.reserved_bytes[all], &numbers.active_bytes[all]}) {
    taken ? each->increase(bytes) : each->decrease(bytes);
  }
}

void release(void* address) {
  Lock lock(state);
  auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return;
  const auto block = found->second;
  blocks.erase(found);
  count(block.device, block.bytes, false);
  if (owner != getpid()) return;  // a forked process lets go of what is its parent's
  std::memset(opened(address), kPoison, block.bytes);
  free_blocks[block.bytes].push_back(static_cast<char*>(address));
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t asked) override {
    Lock lock(state);
    const auto device = current_device();
    if (asked == 0) return {nullptr, nullptr, &release, device};
    map_arena();
    const size_t bytes = (asked + kAlignment - 1) / kAlignment * kAlignment;
    auto& reusable = free_blocks[bytes];
    char* address = nullptr;
    if (reusable.empty()) {
      TORCH_CHECK_WITH(OutOfMemoryError, used + bytes <= kArena, "The sim device is out of memory.");
      address = locked + used;
      used += bytes;
      std::memset(opened(address), kPoison, bytes);
    } else {
      address = reusable.back();
      reusable.pop_back();
    }
    blocks[address] = {bytes, device.index()};
    count(device.index(), bytes, true);
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(opened(target), opened(source), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(state);
    return statistics[device];
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    Lock lock(state);
    auto& numbers = statistics[device];
    for (auto* each : {&numbers.allocated_bytes, &numbers.reserved_bytes, &numbers.active_bytes}) {
      for (auto& stat : *each) stat.reset_peak();
    }
  }
};
DeviceMemory device_allocator;

// ---- pinned memory of the host

std::map<const char*, size_t> pinned;
int64_t pinned_count = 0;

void unpin(void* address) {
  Lock lock(state);
  pinned.erase(static_cast<const char*>(address));
  std::free(address);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(state);
    void* address = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    TORCH_CHECK(address != nullptr, "no pinned memory");
    std::memset(address, kPoison, bytes);
    pinned[static_cast<const char*>(address)] = bytes;
    pinned_count += 1;
    return {address, address, &unpin, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory pinned_allocator;

// ---- streams: a list of tasks that were asked for, in the order of asking

struct Task {
  uint64_t number;
  Stream stream;
  Until until;
  std::function<void()> run;
};
std::vector<Task> tasks;
std::map<std::pair<DeviceIndex, StreamId>, uint64_t> done_until;
uint64_t last_number = 0;
StreamId last_stream = 0;

// Tasks are taken out before they run: one may wait long, for another rank, and another thread goes on meanwhile.
void finish_tasks(const std::function<bool(const Task&)>& is_due) {
  std::vector<Task> due;
  {
    Lock lock(state);
    auto keep = std::stable_partition(tasks.begin(), tasks.end(), [&](const Task& task) { return !is_due(task); });
    std::move(keep, tasks.end(), std::back_inserter(due));
    tasks.erase(keep, tasks.end());
  }
  InKernel quiet;
  for (auto& task : due) task.run();
}

void finish_until(const Stream& stream, uint64_t number) {
  finish_tasks([&](const Task& task) { return task.stream == stream && task.number <= number; });
  Lock lock(state);
  auto& done = done_until[{stream.device_index(), stream.id()}];
  done = std::max(done, number);
}

uint64_t number_now() {
  Lock lock(state);
  return last_number;
}

// Recorded behind all that the stream was asked for. The device is late: an event is not done when first asked about.
struct Event {
  Stream stream;
  uint64_t number;
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
  bool was_asked = false;

  bool is_done() const {
    Lock lock(state);
    return number <= done_until[{stream.device_index(), stream.id()}];
  }
};

// ---- the current device and streams of a thread

thread_local DeviceIndex device_of_thread = 0;
thread_local std::map<DeviceIndex, StreamId> stream_of_thread;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  static Device indexed(Device device) { return device.has_index() ? device : current_device(); }
  static Event* event(void* pointer) { return static_cast<Event*>(pointer); }

  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  Device getDevice() const override { return current_device(); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { device_of_thread = device.index(); }
  Device exchangeDevice(Device device) const override {
    const auto before = current_device();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override { return current_stream(indexed(device)); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, indexed(device)); }
  Stream getNewStream(Device device, int) const override {
    Lock lock(state);
    return Stream(Stream::UNSAFE, indexed(device), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = current_stream(stream.device());
    stream_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(state);
    return std::none_of(tasks.begin(), tasks.end(), [&](const Task& task) { return task.stream == stream; });
  }
  void synchronizeStream(const Stream& stream) const override {
    report("stream", "synchronize");
    finish(stream);
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    report("device", "synchronize");
    finish_tasks([&](const Task& task) { return task.stream.device_index() == index; });
    Lock lock(state);
    for (auto& [key, number] : done_until) {
      if (key.first == index) number = last_number;
    }
  }

  void record(void** pointer, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(state);
    delete event(*pointer);
    *pointer = new Event{stream, ++last_number};
    done_until.try_emplace({stream.device_index(), stream.id()}, 0);
  }
  void destroyEvent(void* pointer, const DeviceIndex) const noexcept override { delete event(pointer); }
  void block(void* pointer, const Stream& stream) const override {
    if (pointer == nullptr || event(pointer)->stream == stream) return;
    const auto waited_for = *event(pointer);
    enqueue(stream, Until::synchronised, [=] { finish_until(waited_for.stream, waited_for.number); });
  }
  bool queryEvent(void* pointer) const override {
    if (pointer == nullptr || event(pointer)->is_done()) return true;
    if (!std::exchange(event(pointer)->was_asked, true)) return false;
    finish_until(event(pointer)->stream, event(pointer)->number);
    return true;
  }
  void synchronizeEvent(void* pointer) const override {
    if (pointer == nullptr) return;
    if (!event(pointer)->is_done()) report("event", "synchronize");
    finish_until(event(pointer)->stream, event(pointer)->number);
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    TORCH_CHECK(event(from)->is_done() && event(to)->is_done(), "elapsed_time of an event that is not done yet");
    return std::chrono::duration<double, std::milli>(event(to)->time - event(from)->time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- random numbers: each device has a stream of its own, drawn by a generator of the host

struct Generator final : c10::GeneratorImpl {
  Generator(DeviceIndex index, at::Generator source)
      : GeneratorImpl(Device(kSim, index), kKeys), source(std::move(source)) {}

  at::Generator source;

  void set_current_seed(uint64_t seed) override { source.set_current_seed(seed); }
  uint64_t current_seed() const override { return source.current_seed(); }
  uint64_t seed() override { return source.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "generators of the sim device have no offset"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& bytes) override { source.unsafeGetGeneratorImpl()->set_state(bytes); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return source.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), source.clone()); }
};

at::Generator new_generator(DeviceIndex index) {
  const uint64_t seed = c10::default_rng_seed_val + 1 + index;  // not what the host draws, nor another device
  return at::make_generator<Generator>(index, at::detail::createCPUGenerator(seed));
}

// ---- what torch asks of an accelerator

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return locked != nullptr; }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_device().index(); }
  void setCurrentDevice(DeviceIndex index) const override { set_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const auto before = current_device().index();
    set_device(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device().index() : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* address) const override {
    Lock lock(state);
    auto next = blocks.upper_bound(static_cast<char*>(address));
    TORCH_CHECK(next != blocks.begin(), "no address of the sim device");
    return Device(kSim, std::prev(next)->second.device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static std::vector<at::Generator> generators = [] {
      std::vector<at::Generator> made;
      for (DeviceIndex each = 0; each < device_count(); ++each) made.push_back(new_generator(each));
      return made;
    }();
    return generators.at(index < 0 ? current_device().index() : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return new_generator(index < 0 ? current_device().index() : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};
Hooks hooks;

const bool registered = [] {
  c10::SetAllocator(kSim, &device_allocator);
  at::setHostAllocator(kSim, &pinned_allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

c10::Allocator& device_memory() { return device_allocator; }

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != kSim) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto seen = at::from_blob(opened(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto memory = device_allocator.allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept != 0) device_allocator.copy_data(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

bool is_pinned(const void* address) {
  Lock lock(state);
  auto next = pinned.upper_bound(static_cast<const char*>(address));
  if (next == pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(next);
  return static_cast<const char*>(address) < begin + std::max<size_t>(bytes, 1);
}

size_t pinned_bytes() {
  Lock lock(state);
  size_t sum = 0;
  for (const auto& each : pinned) sum += each.second;
  return sum;
}

int64_t pinned_allocations() {
  Lock lock(state);
  return pinned_count;
}

void enqueue(const c10::Stream& stream, Until until, std::function<void()> task) {
  Lock lock(state);
  tasks.push_back({++last_number, stream, until, std::move(task)});
}

void finish_before_kernel(c10::DeviceIndex device) {
  finish_tasks([&](const Task& t) { return t.until == Until::kernel && t.stream.device_index() == device; });
}

void finish(const c10::Stream& stream) { finish_until(stream, number_now()); }

c10::Device current_device() { return Device(kSim, device_of_thread); }

void set_device(c10::DeviceIndex index) {
  TORCH_CHECK(index < device_count(), "there is no device sim:", int{index});
  if (index >= 0) device_of_thread = index;
}

c10::DeviceIndex device_count() {
  static const char* asked = std::getenv("SIM_DEVICES");
  static const auto number = static_cast<DeviceIndex>(asked == nullptr ? 2 : std::atoi(asked));
  return number;
}

c10::Stream current_stream(c10::Device device) {
  return Stream(Stream::UNSAFE, device, stream_of_thread[device.index()]);
}

at::Generator default_generator(c10::DeviceIndex index) { return hooks.getDefaultGenerator(index); }

at::Generator host_generator(const at::Generator& generator) {
  auto* mine = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(mine != nullptr, "Expected a generator of the sim device but found one of ", generator.device());
  return mine->source;
}

}  // namespace sim
