// Stand-in for the CUDA hooks and device guard of torch's C++ part. A CPU build has none, and a CUDA build would call
// the driver. Load it before torch, which looks up the hooks at import.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kCUDA = c10::DeviceType::CUDA;
bool may_wait = true;

// One device with one stream. Nothing runs on it, so every event is complete.
struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<kCUDA> {
  static Stream stream() { return Stream(Stream::DEFAULT, Device(kCUDA, 0)); }

  static void wait_for(const char* what) {
    TORCH_CHECK(may_wait, "synchronisation: the host waits for ", what);
  }

  Device getDevice() const override { return Device(kCUDA, 0); }
  Device exchangeDevice(Device) const override { return Device(kCUDA, 0); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait_for("a stream"); }
  void synchronizeEvent(void*) const override { wait_for("an event"); }
  void synchronizeDevice(DeviceIndex) const override { wait_for("the device"); }
};

struct FakeHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
};

// REGISTRY_PREFERRED wins over the hooks of a CUDA build, which register later under the same name.
const bool registered = [] {
  const auto make = [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
    return std::make_unique<FakeHooks>();
  };
  at::CUDAHooksRegistry()->Register("CUDAHooks", make, c10::REGISTRY_PREFERRED);
  return true;
}();

} // namespace

// Call this after importing torch: the guard that is registered last is used.
extern "C" void use_fake_guard() {
  static const FakeGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kCUDA)].store(&guard);
}

// Set whether the host may wait for streams, events and the device.
extern "C" void let_host_wait(bool may) { may_wait = may; }
