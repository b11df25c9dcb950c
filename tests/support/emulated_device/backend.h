// What torch asks of a backend: devices, streams and events by its guard, memory and generators by its hooks.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace emulated {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  // Going to a device and back makes no context there: only what is done there does.
  c10::Device getDevice() const override { return at_index(here); }
  void setDevice(c10::Device d) const override { go_to(d.index(), false); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { here = d.index(); }
  c10::Device exchangeDevice(c10::Device d) const override {
    const int before = here;
    go_to(d.index(), false);
    return at_index(before);
  }

  c10::Stream getStream(c10::Device d) const override { return as_torch(index_of(d), stream_here[index_of(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return as_torch(index_of(d), 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return as_torch(index_of(d), streams().next(index_of(d))->id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto before = as_torch(s.device_index(), stream_here[s.device_index()]);
    stream_here[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return stream_of(s)->is_idle(); }
  void synchronizeStream(const c10::Stream& s) const override { stream_of(s)->drain(); }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    for (Stream* stream : streams().all(d < 0 ? here : d)) stream->drain();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    device_memory().used_by(data.get(), stream_of(s));
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    raise_failure();
    if (!*event) *event = new MomentPtr;
    of(*event) = stream_of(s)->record();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<MomentPtr*>(event); }
  void block(void* event, const c10::Stream& s) const override {
    if (event) stream_of(s)->wait_for(of(event));
  }
  bool queryEvent(void* event) const override { return !event || of(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event) {
      NoGil no_gil;
      of(event)->wait();
    }
    raise_failure();
  }

 private:
  static MomentPtr& of(void* event) { return *static_cast<MomentPtr*>(event); }
  static c10::Device at_index(int d) { return {kType, static_cast<c10::DeviceIndex>(d)}; }
};

inline void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  c10::DeviceGuard guard(c10::Device(kType, storage->device().index()));
  auto made = device_memory().allocate(nbytes);
  if (const size_t n = std::min(nbytes, storage->nbytes())) device_memory().copy_data(made.get(), storage->data(), n);
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(nbytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex d) const override { return has_context[d]; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return here; }
  void setCurrentDevice(c10::DeviceIndex d) const override { go_to(d, true); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return exchanged(d, true); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchanged(d, false); }
  bool isPinnedPtr(const void* address) const override { return pinned().holds(address, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  at::Device getDeviceFromPtr(void* address) const override {
    return {kType, static_cast<c10::DeviceIndex>(device_memory().device_of(address))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? here : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
  static int exchanged(int d, bool is_used) {
    const int before = here;
    if (d >= 0) go_to(d, is_used);
    return before;
  }
};

}  // namespace emulated
