// Operators: copies by hand, everything else by the host's kernels in the stream's thread.
//
// When an operator is called, torch's meta device says what its results look like; they are allocated and handed out at once, and
// the stream computes them later. Its arguments are addresses, as a kernel's are: a queued operator keeps no memory alive. What
// has no meta kernel, or results whose shapes depend on values, waits for its stream first.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "backend.h"

namespace emulated {

inline bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

// The same memory as the stream's thread sees it.
inline at::Tensor exposed(const at::Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  auto view = at::from_blob(device_memory().real(t.unsafeGetTensorImpl()->data()), t.sizes(), t.strides(), options);
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}

// ---- memory ----

inline at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(kType, index_of(c10::device_or_default(device))));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory(), keys, c10::dtype_or_default(dtype), format);
}
inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(kType, index_of(c10::device_or_default(device))));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), keys, c10::dtype_or_default(dtype));
}
inline at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                             std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
inline at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
inline at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t need = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->numel() && need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage from, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  const bool has_strides = stride.size() == size.size();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(from));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, has_strides ? stride : c10::IntArrayRef(at::detail::defaultStrides(size)), offset);
  return self;
}
inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage from) {
  const int64_t n = from.nbytes() / self.itemsize();
  return set_storage(self, std::move(from), 0, {n}, {});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
inline void record_stream(at::Tensor& self, c10::Stream s) {
  device_memory().used_by(self.storage().data(), stream_of(s));
}

// ---- copies ----

inline void queue_copy(Stream* stream, const at::Tensor& to, const at::Tensor& from) {
  stream->put([to, from] { to.copy_(from); });
}

inline void copy_between(const at::Tensor& to, const at::Tensor& from) {
  Stream *theirs = current(from.device().index()), *ours = current(to.device().index());
  if (theirs == ours) return queue_copy(ours, exposed(to), exposed(from));
  theirs->wait_for(ours->record());  // as torch.cuda: by the source's stream, between two waits
  queue_copy(theirs, exposed(to), exposed(from));
  ours->wait_for(theirs->record());
}

inline bool is_one_copy(const at::Tensor& a, const at::Tensor& b) {
  return a.is_contiguous() && b.is_contiguous() && a.dtype() == b.dtype() && !a.is_conj() && !a.is_neg();
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  raise_failure();
  if (!to.numel()) return to;
  auto from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  const bool to_host = !is_ours(to);
  if (is_ours(self) && !to_host) {
    copy_between(to, from);
    return to;
  }
  if (to_host && to.is_contiguous()) from = from.resolve_conj().resolve_neg().to(to.scalar_type()).contiguous();
  Stream* stream = current((to_host ? self : to).device().index());
  const at::Tensor source = to_host ? exposed(from) : from, target = to_host ? to : exposed(to);
  const at::Tensor& host = to_host ? to : from;
  const void* address = host.unsafeGetTensorImpl()->data();
  const bool is_direct = settings.pageable_is_direct || pinned().holds(address, host.nbytes());
  if (non_blocking && is_direct && is_one_copy(from, to)) {
    char* into = static_cast<char*>(target.unsafeGetTensorImpl()->mutable_data());
    const char* out_of = static_cast<const char*>(source.unsafeGetTensorImpl()->data());
    const size_t n = host.nbytes();
    stream->put([=] { memcpy(into, out_of, n); });  // addresses alone: neither side is kept alive
    pinned().used(address, stream->record());
    return to;
  }
  queue_copy(stream, target, source);
  stream->drain();  // of pageable memory, or with a conversion: the host waits
  return to;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}
inline at::Scalar item(const at::Tensor& self) {
  auto out = at::empty({}, self.options().device(at::kCPU));
  copy_from(self.reshape({}), out, false);
  return out.item();
}
inline std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& self, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {self.clone(), at::ones_like(self, at::kBool)};
  auto mask = at::empty_like(self, at::kBool).bernoulli_(1 - p);
  return {self * mask * (1 / (1 - p)), mask};
}

// ---- convolutions: torch asks a backend for its own; these wait for their stream ----

inline at::Tensor brought(Stream* stream, const at::Tensor& t, c10::Device device) {
  if (!t.defined()) return t;
  auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
  queue_copy(stream, exposed(made), t);
  return made;
}
inline at::Tensor convolution(const at::Tensor& self, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                              bool transposed, at::SymIntArrayRef output_padding, c10::SymInt groups) {
  Stream* stream = current(self.device().index());
  stream->drain();
  std::optional<at::Tensor> own;
  if (bias.has_value() && bias->defined()) own = exposed(*bias);
  auto out = at::convolution_symint(exposed(self), exposed(weight), own, stride, padding, dilation, transposed,
                                    output_padding, groups);
  return brought(stream, out, self.device());
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& self, const at::Tensor& weight, at::SymIntArrayRef stride,
    at::SymIntArrayRef padding, at::SymIntArrayRef dilation, bool transposed, at::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  Stream* stream = current(self.device().index());
  stream->drain();
  std::vector<c10::SymInt> bias{weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : c10::SymInt(1))};
  auto [of_self, of_weight, of_bias] =
      at::convolution_backward_symint(exposed(grad), exposed(self), exposed(weight), at::SymIntArrayRef(bias), stride,
                                      padding, dilation, transposed, output_padding, groups, mask);
  return {brought(stream, of_self, self.device()), brought(stream, of_weight, self.device()),
          brought(stream, of_bias, self.device())};
}

// ---- all other operators ----

using Each = std::function<at::Tensor(const at::Tensor&)>;

inline c10::IValue with_tensors(const c10::IValue& value, const Each& each, c10::Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(each(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorList()) out.push_back(each(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      out.push_back(t.has_value() && t->defined() ? std::optional<at::Tensor>(each(*t)) : t);
    return out;
  }
  return value.isDevice() ? c10::IValue(device) : value;
}
inline void for_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& call) {
  with_tensors(value, [&](const at::Tensor& t) { return call(t), t; }, c10::kCPU);
}

inline at::Tensor marked_as(const at::Tensor& like, at::Tensor made) {  // Python numbers take no part in type promotion
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
inline at::Tensor form_of(const at::Tensor& t) {
  if (t.device().is_cpu() && t.dim() == 0) return t;
  return marked_as(t, at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(false)));
}
inline at::Tensor argument(const at::Tensor& t) {
  return is_ours(t) ? exposed(t) : t.device().is_cpu() ? marked_as(t, t.clone()) : t;
}

struct Call {  // of one operator
  const c10::OperatorHandle& op;
  const std::vector<c10::IValue> args;
  int device = -1;
  bool writes_host = false;
  std::vector<c10::IValue> forms, values;
  torch::jit::Stack results;

  Call(const c10::OperatorHandle& op, std::vector<c10::IValue> given) : op(op), args(std::move(given)) {
    for (size_t i = 0; i < args.size(); i++) {
      for_tensors(args[i], [&](const at::Tensor& t) {
        if (is_ours(t) && device < 0) device = t.device().index();
        if (t.device().is_cpu() && is_written(i)) writes_host = true;
      });
      if (args[i].isDevice() && device < 0 && args[i].toDevice().type() == kType) device = index_of(args[i].toDevice());
    }
    if (device < 0) device = here;
  }
  bool is_written(size_t i) const {
    const auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  void read_arguments() {
    for (size_t i = 0; i < args.size(); i++) {
      if (op.schema().arguments()[i].type()->str().find("Generator") != std::string::npos) {
        at::Generator own = args[i].isNone() ? default_generator(device) : args[i].toGenerator();
        forms.emplace_back();
        values.emplace_back(at::detail::createCPUGenerator(static_cast<Generator*>(own.unsafeGetGeneratorImpl())->draw()));
      } else {
        forms.push_back(with_tensors(args[i], form_of, c10::kMeta));
        values.push_back(with_tensors(args[i], argument, c10::kCPU));
      }
    }
  }
  bool is_form_known() {
    if (writes_host) return false;
    try {
      results.assign(forms.begin(), forms.end());
      op.callBoxed(&results);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
  void resize_outputs() {  // out= of another size
    for (size_t i = 0; i < args.size(); i++) {
      if (!is_written(i) || !args[i].isTensor() || !args[i].toTensor().defined()) continue;
      at::Tensor t = args[i].toTensor(), form = forms[i].toTensor();
      if (t.sizes() == form.sizes() && t.strides() == form.strides()) continue;
      resize_(t, form.sizes(), std::nullopt);
      t.unsafeGetTensorImpl()->set_sizes_and_strides(form.sizes(), form.strides(), t.storage_offset());
      values[i] = exposed(t);
    }
  }
  std::optional<size_t> argument_returned(size_t k) const {
    const auto* alias = op.schema().returns()[k].alias_info();
    if (!alias || !alias->isWrite()) return std::nullopt;
    for (size_t i = 0; i < args.size(); i++)
      if (is_written(i) && op.schema().arguments()[i].alias_info()->beforeSets() == alias->beforeSets()) return i;
    return std::nullopt;
  }
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  raise_failure();
  const size_t count = op.schema().arguments().size(), returned = op.schema().returns().size();
  Call call(op, {stack->end() - count, stack->end()});
  const c10::Device device(kType, call.device);
  c10::DeviceGuard guard(device);
  at::AutoDispatchBelowADInplaceOrView below;
  call.read_arguments();
  Stream* stream = current(call.device);
  const bool is_queued = call.is_form_known();
  (is_queued ? settings.queued : settings.waited)++;
  if (is_queued) {
    call.resize_outputs();
  } else {
    stream->drain();
    NoGil no_gil;
    call.results.assign(call.values.begin(), call.values.end());
    op.callBoxed(&call.results);
  }
  std::vector<c10::IValue> out;
  std::vector<std::vector<at::Tensor>> targets(returned);
  for (size_t k = 0; k < returned; k++) {
    if (auto i = call.argument_returned(k)) {
      out.push_back(call.args[*i]);
      continue;
    }
    auto make = [&](const at::Tensor& t) {
      auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
      if (!is_queued) queue_copy(stream, exposed(made), t);
      targets[k].push_back(exposed(made));
      return made;
    };
    out.push_back(with_tensors(call.results[k], make, device));
  }
  if (is_queued)
    stream->put([op, values = call.values, targets] {
      torch::jit::Stack results(values.begin(), values.end());
      if (op.schema().name() == "aten::native_layer_norm_backward")  // the host wants its statistics in the input's type
        for (size_t i : {3, 4}) results[i] = results[i].toTensor().to(results[1].toTensor().dtype());
      op.callBoxed(&results);
      for (size_t k = 0; k < targets.size(); k++) {
        size_t n = 0;
        if (!targets[k].empty()) for_tensors(results[k], [&](const at::Tensor& t) { targets[k][n++].copy_(t); });
      }
    });
  stack->erase(stack->end() - count, stack->end());
  stack->insert(stack->end(), std::make_move_iterator(out.begin()), std::make_move_iterator(out.end()));
}

}  // namespace emulated
