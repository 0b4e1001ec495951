// Lets a build of torch without CUDA hold tensors that say they are on "cuda": hooks that say that
// there is one device, a device guard whose streams and events only tell what happens, and
// "page-locked" memory that is plain memory. See device.py, which builds and loads it.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <mutex>
#include <set>

namespace at {
namespace {
std::mutex lock;
std::set<const void*> pinned;

void give_back(void* data) {
  { std::lock_guard<std::mutex> held(lock); pinned.erase(data); }
  c10::GetCPUAllocator()->raw_deleter()(data);
}

struct Pinned final : at::HostAllocator {
  at::DataPtr allocate(size_t size) override {
    void* data = c10::GetCPUAllocator()->allocate(size ? size : 1).release_context();
    { std::lock_guard<std::mutex> held(lock); pinned.insert(data); }
    return {data, data, give_back, at::Device(at::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void begin_allocate_to_pool(c10::MempoolId_t, std::function<bool(c10::Stream)>) override {}
  void end_allocate_to_pool(c10::MempoolId_t) override {}
  void release_pool(c10::MempoolId_t) override {}
};
Pinned allocator;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(lock);
    return pinned.count(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &allocator; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)

// Streams are numbers; what is recorded and waited for goes to whoever listens.
using Told = void (*)(int what, int64_t stream, int64_t event);  // what: Told in device.py
Told told = nullptr;
thread_local int64_t current = 0;
std::atomic<int64_t> streams{1}, events{1};
void tell(int what, int64_t stream, int64_t event) { if (told) told(what, stream, event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto kind = c10::DeviceType::CUDA;
  static c10::Device device() { return {kind, 0}; }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(streams++); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(streams++); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto was = current; current = to.id(); return stream(was);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(events++);
    tell(1, on.id(), reinterpret_cast<int64_t>(*event));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) tell(2, on.id(), reinterpret_cast<int64_t>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override { if (event) tell(3, 0, reinterpret_cast<int64_t>(event)); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& on) const override { tell(4, on.id(), 0); }
  void synchronizeDevice(const c10::DeviceIndex) const override { tell(5, 0, 0); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};
Guard guard;
}  // namespace
}  // namespace at

extern "C" int register_stub() {
  using namespace at;
  setHostAllocator(kCUDA, &allocator, 1);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  return at::detail::getCUDAHooks().hasCUDA();
}

extern "C" void listen(at::Told to) { at::told = to; }
extern "C" int64_t current_stream() { return at::current; }
