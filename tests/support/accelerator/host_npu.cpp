// An accelerator that torch knows as PrivateUse1, for tests: its memory is host memory, its kernels are the CPU's.
//
// Copies to the host that do not block are carried out late: their bytes are taken when they are queued, as a
// stream would do it, and arrive when an event behind them is asked a second time or waited for. Who reads host
// memory before that reads 0xCC. HOSTNPU_FAULT names the kernel that is wrong: gelu, addmm, _softmax.
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

std::mutex lock;
struct LateCopy {
  int64_t number;
  void* to;
  std::vector<char> bytes;
};
std::deque<LateCopy> late;
int64_t queued = 0;
int64_t copies_late = 0, copies_waiting = 0;
std::set<const void*> pinned;

void arrive(int64_t number) {
  std::lock_guard<std::mutex> hold(lock);
  while (!late.empty() && late.front().number <= number) {
    std::memcpy(late.front().to, late.front().bytes.data(), late.front().bytes.size());
    late.pop_front();
  }
}

struct Memory final : c10::Allocator {
  explicit Memory(bool host) : host_(host) {}
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    if (data) std::memset(data, 0xCC, size);
    if (host_ && data) {
      std::lock_guard<std::mutex> hold(lock);
      pinned.insert(data);
    }
    return {data, data, host_ ? &unpin : &std::free, c10::Device(host_ ? c10::kCPU : kNpu, host_ ? -1 : 0)};
  }
  static void unpin(void* data) {
    arrive(queued);
    {
      std::lock_guard<std::mutex> hold(lock);
      pinned.erase(data);
    }
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return host_ ? &unpin : &std::free; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool host_;
};
Memory device_memory(false), pinned_memory(true);
REGISTER_ALLOCATOR(kNpu, &device_memory);

struct Event {
  int64_t number;
  int asked;
};
thread_local c10::StreamId current = 0;
c10::StreamId newest = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device) const override { return {kNpu, 0}; }
  c10::Device getDevice() const override { return {kNpu, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::UNSAFE, {kNpu, 0}, current); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::UNSAFE, {kNpu, 0}, 0); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::UNSAFE, {kNpu, 0}, ++newest); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream before(c10::Stream::UNSAFE, {kNpu, 0}, current);
    current = s.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    std::lock_guard<std::mutex> hold(lock);
    *static_cast<Event*>(*event) = {queued, 0};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    auto* mark = static_cast<Event*>(event);
    if (!mark) return true;
    bool pending;
    {
      std::lock_guard<std::mutex> hold(lock);
      pending = !late.empty() && late.front().number <= mark->number;
    }
    if (pending && mark->asked++ == 0) return false;
    arrive(mark->number);
    return true;
  }
  bool queryStream(const c10::Stream&) const override { return late.empty(); }
  void synchronizeStream(const c10::Stream&) const override { arrive(queued); }
  void synchronizeEvent(void* event) const override {
    if (event) arrive(static_cast<Event*>(event)->number);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { arrive(queued); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> hold(lock);
    return pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = device_memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
int registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), 0);

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), [t](void*) {}, t.options().device(c10::kCPU));
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  auto scalar = dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
  int64_t last = 1;
  for (size_t i = 0; i < size.size(); i++) {
    if (!size[i]) last = 0;
    if (last) last += (size[i] - 1) * stride[i];
  }
  size_t bytes = last * c10::elementSize(scalar);
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), bytes, device_memory.allocate(bytes), &device_memory, true);
  auto t = at::detail::make_tensor<at::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(scalar));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return t;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat>) {
  std::vector<int64_t> stride(size.size());
  int64_t step = 1;
  for (int64_t i = static_cast<int64_t>(size.size()) - 1; i >= 0; i--) {
    stride[i] = step;
    step *= std::max<int64_t>(size[i], 1);
  }
  return empty_strided(size, stride, dtype, layout, device, pin);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool down = to.is_cpu() && !from.is_cpu();
  bool plain = from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype() && from.sizes() == to.sizes();
  if (down && non_blocking && plain && from.numel()) {
    auto* bytes = static_cast<const char*>(from.const_data_ptr());
    std::lock_guard<std::mutex> hold(lock);
    late.push_back({++queued, to.mutable_data_ptr(), std::vector<char>(bytes, bytes + from.nbytes())});
    copies_late++;
    return to;
  }
  copies_waiting += down;
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes());
  on_host(to).copy_(on_host(from));
  return to;
}

bool faulty(const char* kernel) {
  const char* fault = std::getenv("HOSTNPU_FAULT");
  return fault && std::string(fault) == kernel;
}

at::Tensor here(const at::Tensor& t) {
  auto made = empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, {}, {});
  on_host(made).copy_(t);
  return made;
}

at::Tensor gelu(const at::Tensor& x, c10::string_view approximate) {
  auto made = at::gelu(on_host(x), approximate);
  if (faulty("gelu")) made.mul_(1.05);
  return here(made);
}

at::Tensor addmm(
    const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  auto made = at::addmm(on_host(bias), on_host(a), on_host(b), beta, alpha);
  // Row 0 of the product is lost: what a wrong tile boundary does.
  if (faulty("addmm")) made.select(0, 0).zero_();
  return here(made);
}

at::Tensor softmax(const at::Tensor& x, int64_t axis, bool half_to_float) {
  auto made = at::_softmax(on_host(x), axis, half_to_float);
  if (faulty("_softmax")) made.fill_(std::numeric_limits<float>::infinity());
  return here(made);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("gelu", TORCH_FN(gelu));
  m.impl("addmm", TORCH_FN(addmm));
  m.impl("_softmax", TORCH_FN(softmax));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(host_npu, m) {
  m.def("late_copies", []() { return copies_late; });
  m.def("waiting_copies", []() { return copies_waiting; });
}
