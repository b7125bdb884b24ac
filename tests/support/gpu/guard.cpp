// What torch's C++ asks of a CUDA, an XPU or an MPS that is not here: a device guard and hooks that only count devices and
// remember which one is current, so that autograd starts its real device threads. To be loaded before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

static DeviceType here = DeviceType::CUDA;
static DeviceIndex count = 1;
static thread_local DeviceIndex current = 0;

extern "C" void fake_cards_are(int cards) { count = static_cast<DeviceIndex>(cards); }
extern "C" void fake_device_is(int type) { here = static_cast<DeviceType>(type); }

template <DeviceType kind>
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kind; }
  Device getDevice() const override { return Device(kind, current); }
  DeviceIndex deviceCount() const noexcept override { return count; }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }

  Stream getStream(Device device) const noexcept override {
    DeviceIndex index = device.index() < 0 ? current : device.index();
    return Stream(Stream::DEFAULT, Device(kind, index));
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard<DeviceType::CUDA>)
C10_REGISTER_GUARD_IMPL(XPU, Guard<DeviceType::XPU>)
C10_REGISTER_GUARD_IMPL(MPS, Guard<DeviceType::MPS>)

namespace at {
namespace {
template <class Interface, DeviceType kind>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return here == kind; }
  bool isAvailable() const override { return here == kind; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  DeviceIndex deviceCount() const override { return count; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
};
struct CUDAHooks : Hooks<CUDAHooksInterface, DeviceType::CUDA> {
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return isBuilt(); }
  DeviceIndex current_device() const override { return current; }
};
struct XPUHooks : Hooks<XPUHooksInterface, DeviceType::XPU> {
  bool hasXPU() const override { return isBuilt(); }
  DeviceIndex current_device() const override { return current; }
};
struct MPSHooks : Hooks<MPSHooksInterface, DeviceType::MPS> {
  bool hasMPS() const override { return isBuilt(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
REGISTER_XPU_HOOKS(XPUHooks)
REGISTER_MPS_HOOKS(MPSHooks)
}  // namespace
}  // namespace at
