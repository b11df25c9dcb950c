// The extension module: registers torch's PrivateUse1 backend; __init__.py gives it its name and its module.
#include "operators.h"

namespace emulated {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("native_dropout", TORCH_FN(dropout));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

Generator* generator(int device) { return static_cast<Generator*>(default_generator(device).unsafeGetGeneratorImpl()); }

PYBIND11_MODULE(_emulated, m) {
  c10::SetAllocator(kType, &device_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("current_device", [] { return here; });
  m.def("set_device", [](int d) { go_to(d, true); });
  m.def("exchange_device", [](int d) { return Hooks::exchanged(d, true); });
  m.def("maybe_exchange_device", [](int d) { return Hooks::exchanged(d, false); });
  m.def("host_register", [](uintptr_t at, size_t n) { return pinned().add(at, n); });
  m.def("host_unregister", [](uintptr_t at) { return pinned().remove(at); });
  m.def("pinned_bytes", [] { return pinned().bytes(); });
  m.def("most_pinned_bytes", [] { return pinned().most(); });
  m.def("memory_allocated", [](int d) { return device_memory().live_bytes(d); });
  m.def("manual_seed", [](int d, uint64_t seed) { generator(d)->set_current_seed(seed); });
  m.def("generator_state", [](int d) { return std::make_pair(generator(d)->seed_, generator(d)->drawn_); });
  m.def("set_generator_state", [](int d, uint64_t seed, uint64_t drawn) {
    generator(d)->seed_ = seed, generator(d)->drawn_ = drawn;
  });
  // what tests alone ask for
  m.def("schedule", [](uint64_t seed, int us) { settings.seed = seed, settings.pause_us = us; });
  m.def("context_ms", [](int ms) { settings.context_ms = ms; });
  m.def("memory_limit", [](size_t n) { settings.memory_limit = n; });
  m.def("pin_limit", [](size_t n) { settings.pin_limit = n; });
  m.def("refuse_memory_in", [](long n) { settings.refuse_memory_in = n; });
  m.def("refuse_streams", [](bool yes) { settings.refuse_streams = yes; });
  m.def("pageable_is_direct", [](bool yes) { settings.pageable_is_direct = yes; });
  m.def("fail_in", [](long n, int code) { settings.fail_code = code, settings.fail_in = n; });
  m.def("operations", [] { return std::make_pair(settings.queued.load(), settings.waited.load()); });
  m.def("contexts", [] {
    std::vector<int> found;
    for (int d = 0; d < kDevices; d++)
      if (has_context[d]) found.push_back(d);
    return found;
  });
}

}  // namespace emulated
