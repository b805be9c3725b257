// A CUDA device for builds of torch without one: its memory is the host's, its kernels are the CPU's.
//
// Tensors are of the device type "cuda", so dispatch, autograd, autocast and the choice of backends
// are those of a GPU. Every operation without a composite form reaches `fallback`, which refuses
// tensors of different devices as a GPU does and computes on aliases of its arguments. New memory
// is filled with NaN, since a GPU's is not zero either.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::DispatchKey, c10::IValue, c10::Stream;

constexpr DeviceIndex DEVICES = 2;
constexpr size_t ALIGNMENT = 512;  // what CUDA's caching allocator guarantees
thread_local DeviceIndex current = 0;
std::atomic<bool> forbid_reads{false};  // of the device's values by the host

void release(void* memory) { std::free(memory); }

struct Memory : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    if (size) {
      memory = std::aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
      std::memset(memory, 0xff, size);
    }
    return {memory, memory, &release, Device(DeviceType::CUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, current}; }
  Device exchangeDevice(Device to) const override {
    auto from = getDevice();
    setDevice(to);
    return from;
  }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.index() >= 0 && to.index() < DEVICES, "invalid device ordinal");
    current = to.index();
  }
  void uncheckedSetDevice(Device to) const noexcept override { current = to.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Random : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();

  explicit Random(DeviceIndex index)
      : GeneratorImpl({DeviceType::CUDA, index}, c10::DispatchKeySet(DispatchKey::CUDA)) {}
  static DeviceType device_type() { return DeviceType::CUDA; }
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Random* clone_impl() const override {
    auto copy = new Random(device().index());
    copy->host = host.clone();
    return copy;
  }
};

const at::Generator& default_random(DeviceIndex index) {
  static at::Generator all[] = {at::make_generator<Random>(0), at::make_generator<Random>(1)};
  return all[index < 0 ? current : index];
}

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {  // the name that torch looks for
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  int getNumGPUs() const override { return DEVICES; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(current, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_random(index);
  }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<Random>(index < 0 ? current : index);
  }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &memory; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

// The same memory as a tensor of the other device.
Tensor alias(const Tensor& x, Device device, void* keep, c10::DeleterFnPtr free) {
  auto& storage = x.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), keep, free, device);
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                    device.is_cuda() ? &memory : c10::GetCPUAllocator(), /*resizable=*/true);
  auto key = device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(key), x.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return result;
}

Tensor on_host(const Tensor& x) {
  return x.is_cuda() ? alias(x, DeviceType::CPU, nullptr, [](void*) {}) : x;
}

Tensor on_device(const Tensor& x, DeviceIndex index) {
  auto free = [](void* kept) { delete static_cast<Tensor*>(kept); };
  return alias(x, Device(DeviceType::CUDA, index), new Tensor(x), free);
}

void check_read(const std::string& what) {
  TORCH_CHECK(!forbid_reads, what, " makes the host wait for the GPU");
}

// Indices may be on the host, and so may single numbers.
const std::set<std::string> TAKES_HOST_INDICES = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
const std::set<std::string> READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select",
    "aten::is_nonzero", "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  if (READS.count(name)) check_read(name);
  std::unordered_map<c10::TensorImpl*, Tensor> seen;  // an argument's alias
  std::unordered_map<c10::TensorImpl*, Tensor> given;  // and back
  std::set<const void*> memories;  // of arguments, as they were
  std::optional<Device> device;

  for (size_t i = begin; i < stack->size(); ++i) {  // the device, before anything is refused
    auto look = [&](const Tensor& x) {
      if (!x.defined() || !x.is_cuda()) return;
      if (!device) device = x.device();
      TORCH_CHECK(*device == x.device(), "Expected all tensors to be on the same device, but found ",
                  *device, " and ", x.device(), " (", name, ")");
    };
    auto& value = (*stack)[i];
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) for (const Tensor& x : value.toTensorList()) look(x);
    if (value.isOptionalTensorList())
      for (const std::optional<Tensor>& x : value.toOptionalTensorList()) if (x) look(*x);
    if (value.isDevice() && value.toDevice().is_cuda() && !device) {
      device = value.toDevice().has_index() ? value.toDevice() : Device(DeviceType::CUDA, current);
    }
  }
  auto convert = [&](const Tensor& x) -> Tensor {
    if (!x.defined()) return x;
    if (!x.is_cuda()) {
      TORCH_CHECK(x.dim() == 0 || TAKES_HOST_INDICES.count(name),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device.value_or(Device(DeviceType::CUDA, current)), " and ", x.device(), "! (",
                  name, ")");
      return x;
    }
    auto& same = seen[x.unsafeGetTensorImpl()];
    if (!same.defined()) same = on_host(x);
    given[same.unsafeGetTensorImpl()] = x;
    if (x.storage().data()) memories.insert(x.storage().data());
    return same;
  };
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const auto& type = schema.arguments()[i - begin].type();
    if (value.isTensor()) {
      value = convert(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorList()) list.push_back(convert(x));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& x : value.toOptionalTensorList())
        list.push_back(x ? std::optional<Tensor>(convert(*x)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator()) {
      auto random = dynamic_cast<Random*>(value.toGenerator().unsafeGetGeneratorImpl());
      TORCH_CHECK(random, "Expected a 'cuda' device type for generator but found 'cpu' (", name, ")");
      value = random->host;
    } else if (value.isNone() && type->str() == "Generator?") {
      auto& random = default_random(device ? device->index() : current);
      value = static_cast<Random*>(random.unsafeGetGeneratorImpl())->host;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);

  for (const auto& [impl, x] : given) {  // out=: the empty tensors of composite operations grow
    if (impl->storage().data() != x.storage().data()) {
      auto grown = on_device(Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(impl)),
                             x.device().index());
      x.storage().set_data_ptr_noswap(std::move(grown.storage().unsafeGetStorageImpl()->mutable_data_ptr()));
      x.storage().set_nbytes(grown.storage().nbytes());
    }
    x.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  }
  const auto index = device ? device->index() : current;
  auto back = [&](const Tensor& x) -> Tensor {
    if (!x.defined() || x.is_cuda()) return x;
    if (auto found = given.find(x.unsafeGetTensorImpl()); found != given.end()) return found->second;
    TORCH_CHECK(!memories.count(x.storage().data()), name, " returns a view; register it");
    return on_device(x, index);
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorList()) list.push_back(back(x));
      value = list;
    }
  }
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(DispatchKey::CUDA), type, format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(DispatchKey::CUDA), type);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.is_cuda() && from.is_cuda() && !non_blocking) check_read("a copy to the host");
  on_host(to).copy_(on_host(from));
  return to;
}

const Tensor& resize_(const Tensor& x, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (needed > impl->storage().nbytes()) {
    auto data = memory.allocate(needed);
    if (impl->storage().nbytes()) std::memcpy(data.get(), impl->storage().data(), impl->storage().nbytes());
    impl->storage().set_data_ptr_noswap(std::move(data));
    impl->storage().set_nbytes(needed);
  }
  return x;
}

void record_stream(Tensor&, Stream) {}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}

TORCH_LIBRARY(stand_in, m) {
  m.def("on_host(Tensor x) -> Tensor", on_host);
  m.def("forbid_reads(bool forbid) -> ()", [](bool forbid) { forbid_reads = forbid; });
  m.def("device_count() -> int", []() -> int64_t { return DEVICES; });
  m.def("default_generator(int index) -> Generator?", [](int64_t index) -> at::Generator {
    return default_random(static_cast<DeviceIndex>(index));
  });
  m.def("exchange_device(int index) -> int", [](int64_t index) -> int64_t {
    return std::exchange(current, index < 0 ? current : static_cast<DeviceIndex>(index));
  });
}

static const bool allocator_is_set = [] {
  c10::SetAllocator(DeviceType::CUDA, &memory, 1);
  return true;
}();
