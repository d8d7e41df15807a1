// CUDA devices for a torch that is built without CUDA.
//
// Registers at torch's own CUDA dispatch key: allocators, streams, events, generators and operators.
// Tensors really are of the device cuda:N. An operator runs on the CPU at once, on the same memory, and
// notes what it reads and writes in the current stream (memory.h); whatever would come too early on a
// real device is reported (clocks.h).
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.h"

namespace simulated {

using at::IntArrayRef;
using at::ScalarType;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using std::optional;

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// --- Generators: those of the CPU, by another name --------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator inner;

  Generator(DeviceIndex device, at::Generator inner)
      : GeneratorImpl(Device(c10::kCUDA, device), kKeys), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), inner.clone()); }
};

std::vector<at::Generator> default_generators(kMaxDevices);
bool next_generator_is_default = false;

// --- What torch asks a backend -------------------------------------------------------------------

DeviceIndex exchange_device(DeviceIndex device) {
  DeviceIndex before = current_device;
  if (device >= 0) current_device = device;
  return before;
}

DeviceIndex or_current(DeviceIndex device) { return device < 0 ? current_device : device; }

struct Hooks : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return simulated::current_device; }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange_device(device);
  }
  bool isPinnedPtr(const void* address) const override {
    Lock lock(mutex);
    return find(host_blocks, address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void* address) const override {
    Lock lock(mutex);
    DeviceBlock* block = find(device_blocks, address);
    return Device(c10::kCUDA, block ? block->device : 0);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generators[or_current(device)];
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    device = or_current(device);
    auto made = at::make_generator<Generator>(device, at::detail::createCPUGenerator());
    if (next_generator_is_default) default_generators[device] = made;
    next_generator_is_default = false;
    return made;
  }
  void deviceSynchronize(DeviceIndex device) const override {
    Lock lock(mutex);
    synchronize(device);
  }
};

struct Event {
  Clock clock;
  double ready_s = 0;
};

int number_of(const c10::Stream& stream) {
  return stream_number(stream.device_index(), stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Device exchangeDevice(Device device) const override {
    return Device(c10::kCUDA, exchange_device(device.index()));
  }
  Device getDevice() const override { return Device(c10::kCUDA, current_device); }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }

  static c10::Stream stream(DeviceIndex device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(c10::kCUDA, device), id);
  }
  c10::Stream getStream(Device device) const override {
    DeviceIndex index = or_current(device.index());
    return stream(index, current_stream_id(index));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return stream(or_current(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(Device device, int = 0) const override {
    // As in torch: 32 streams for each device, in turn.
    static std::vector<int64_t> made(kMaxDevices, 0);
    Lock lock(mutex);
    DeviceIndex index = or_current(device.index());
    return stream(index, 1 + made[index]++ % 32);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    return covers(host, enqueued(number_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    wait_on_host(enqueued(number_of(stream)), "synchronize a stream");
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Lock lock(mutex);
    synchronize(device);
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event;
    *(Event*)*event = {enqueued(number_of(stream)), ready_s(number_of(stream))};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (!event) return;
    Stream& waiting = streams[number_of(stream)];
    merge(waiting.clock, ((Event*)event)->clock);
    waiting.ready_s = std::max(waiting.ready_s, ((Event*)event)->ready_s);
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    return !event || covers(host, ((Event*)event)->clock);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return 1e3 * (((Event*)end)->ready_s - ((Event*)begin)->ready_s);
  }
  void synchronizeEvent(void* event) const override {
    double late_s = event ? ((Event*)event)->ready_s - now_s() : 0;
    if (late_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(late_s));
    Lock lock(mutex);
    if (event) wait_on_host(((Event*)event)->clock, "synchronize an event");
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete (Event*)event; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator.recordStream(data, stream);
  }
};

// --- Operators that make, view and copy tensors ------------------------------------------------

bool is_simulated(const Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }

// An allocator that torch's own functions can be given for a device.
struct AllocatorOf final : c10::Allocator {
  DeviceIndex device;
  explicit AllocatorOf(DeviceIndex device) : device(device) {}
  c10::DataPtr allocate(size_t bytes) override { return device_allocator.allocate_on(bytes, device); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_on_device; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    memcpy(target, source, bytes);
  }
};

// Storages keep a pointer to their allocator: there is one for each device, for good.
c10::Allocator* allocator_of(optional<Device> device) {
  static std::vector<std::unique_ptr<AllocatorOf>> all = [] {
    std::vector<std::unique_ptr<AllocatorOf>> made;
    for (int i = 0; i < kMaxDevices; i++) made.push_back(std::make_unique<AllocatorOf>(i));
    return made;
  }();
  DeviceIndex index = device ? or_current(device->index()) : current_device;
  TORCH_CHECK(index < num_devices, "CUDA error: invalid device ordinal (simulated)");
  return all[index].get();
}

Tensor empty(IntArrayRef size, optional<ScalarType> dtype, optional<at::Layout>,
             optional<Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, allocator_of(device), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype,
                     optional<at::Layout>, optional<Device> device, optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, allocator_of(device), kKeys,
                                           c10::dtype_or_default(dtype));
}

// The memory of a tensor as a CPU tensor.
Tensor on_cpu(const Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU).pinned_memory(false).requires_grad(false);
  if (!tensor.numel() && !tensor.storage().data())
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  Tensor alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

void use(const Tensor& tensor, const Operation& now, bool is_write, const std::string& name) {
  if (is_simulated(tensor) && tensor.numel()) use(tensor.data_ptr(), now, is_write, name);
}

// An operation in the current stream of a device.
void enqueue(const std::string& name, DeviceIndex device, const std::vector<Tensor>& reads,
             const std::vector<Tensor>& writes) {
  Lock lock(mutex);
  Operation now = launch(current_stream(device));
  for (const Tensor& tensor : reads) use(tensor, now, false, name);
  for (const Tensor& tensor : writes) use(tensor, now, true, name);
}

void copy_between_devices(const Tensor& target, const Tensor& source) {
  // As in torch, in the source's stream, and the streams of both wait for each other.
  int from = current_stream(source.device().index()), to = current_stream(target.device().index());
  if (from != to) wait_for(from, to);
  Operation now = launch(from);
  use(source, now, false, "copy_");
  use(target, now, true, "copy_");
  if (from != to) wait_for(to, from);
  on_cpu(target).copy_(on_cpu(source));
}

void copy_to_device(const Tensor& target, const Tensor& source, bool non_blocking) {
  int stream = current_stream(target.device().index());
  Operation now = launch(stream);
  use(target, now, true, "copy_ to the device");
  on_cpu(target).copy_(source.resolve_conj());
  HostBlock* block = find(host_blocks, source.data_ptr());
  if (block && source.is_contiguous() && source.scalar_type() == target.scalar_type()) {
    const char* from = (const char*)source.data_ptr();
    block->streams.insert(stream);
    uploads.push_back({now, from, source.nbytes(), sum_of(from, source.nbytes())});
  } else if (non_blocking) {
    report("pageable", std::to_string(target.nbytes()) +
                           " bytes are copied with non_blocking=True from memory that is not"
                           " page-locked, or not contiguous");
  }
  if (!non_blocking) wait_on_host(enqueued(stream), "copy to a device");
}

void copy_from_device(const Tensor& target, const Tensor& source, bool non_blocking) {
  int stream = current_stream(source.device().index());
  Operation now = launch(stream);
  use(source, now, false, "copy_ to the host");
  if (non_blocking && find(host_blocks, target.data_ptr())) {
    // Until the program has waited for it, other bytes are there.
    Tensor value = on_cpu(source).clone(), late = target;
    memset(target.data_ptr(), 0xEE, target.nbytes());
    downloads.push_back({now, [value, late]() mutable { late.copy_(value); }});
  } else {
    target.copy_(on_cpu(source));
    wait_on_host(enqueued(stream), "copy to the host");
  }
}

Tensor& copy_(Tensor& target, const Tensor& source, bool non_blocking) {
  if (!target.numel()) return target;
  at::NoGradGuard guard;
  Lock lock(mutex);
  if (is_simulated(target) && is_simulated(source))
    copy_between_devices(target, source);
  else if (is_simulated(target))
    copy_to_device(target, source, non_blocking);
  else
    copy_from_device(target, source, non_blocking);
  return target;
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  DeviceIndex device = tensor.device().index();
  enqueue("item", device, {tensor}, {});
  Lock lock(mutex);
  wait_on_host(enqueued(current_stream(device)), "item");
  return on_cpu(tensor).item();
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  if (tensor.has_storage()) device_allocator.recordStream(tensor.storage().data_ptr(), stream);
}

const Tensor& resize_(const Tensor& tensor, IntArrayRef size, optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, tensor.dtype().itemsize(),
                                                            tensor.storage_offset());
  if (bytes > storage->nbytes()) {
    c10::DataPtr data = device_allocator.allocate_on(bytes, tensor.device().index());
    if (storage->nbytes()) memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, c10::Storage storage) {
  int64_t count = storage.nbytes() / tensor.dtype().itemsize();
  return set_storage(tensor, std::move(storage), 0, {count}, {});
}

// --- All other operators -----------------------------------------------------------------------

// The size of what they return depends on values: the program waits for it.
const std::set<std::string> kWaiting = {
    "aten::nonzero",       "aten::masked_select", "aten::_unique2",
    "aten::equal",         "aten::unique_dim",    "aten::unique_consecutive",
    "aten::bincount",      "aten::is_nonzero",    "aten::repeat_interleave.Tensor",
    "aten::histc",
};
// Their indices may be on the CPU.
const std::set<std::string> kIndexing = {
    "aten::index.Tensor",         "aten::index.Tensor_out", "aten::_index_put_impl_",
    "aten::index_put_",           "aten::_unsafe_index.Tensor",
};

// Runs one operator on the CPU, with the memory of its device tensors as CPU tensors.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack) {
    name_ = schema_.name();
    if (!schema_.overload_name().empty()) name_ += "." + schema_.overload_name();
    size_t count = schema_.arguments().size();
    given_.assign(stack->end() - count, stack->end());
    device_ = find_device();
    // These take numbers as CPU tensors, such as the step counts of optimizers.
    for (const char* part : {"_foreach", "_amp_", "_fused_"})
      may_mix_ |= name_.find(part) != std::string::npos;
  }

  void run() {
    torch::jit::Stack arguments;
    for (size_t i = 0; i < given_.size(); i++) arguments.push_back(convert(i));
    enqueue(name_, device_, reads_, writes_);
    bool waits = kWaiting.count(name_) || is_masked_;
    if (waits) wait(name_);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    for (auto& [tensor, result] : written_) keep(tensor, result);
    torch::jit::drop(*stack_, given_.size());
    for (size_t i = 0; i < schema_.returns().size(); i++)
      stack_->push_back(result(schema_.returns()[i], arguments[i], waits));
  }

 private:
  DeviceIndex find_device() const {
    DeviceIndex found = -1;
    auto see = [&](const Tensor& tensor) {
      if (found < 0 && is_simulated(tensor)) found = tensor.device().index();
    };
    for (const IValue& value : given_) {
      if (value.isTensor()) see(value.toTensor());
      if (value.isTensorList())
        for (const Tensor& tensor : value.toTensorVector()) see(tensor);
      if (value.isOptionalTensorList())
        for (const optional<Tensor>& tensor : value.toOptionalTensorVector())
          if (tensor) see(*tensor);
    }
    for (const IValue& value : given_)
      if (found < 0 && value.isDevice()) found = value.toDevice().index();
    return or_current(found);
  }

  void wait(const std::string& what) {
    Lock lock(mutex);
    wait_on_host(enqueued(current_stream(device_)), what);
  }

  [[noreturn]] void refuse(const std::string& other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two"
                " devices, cuda:", device_, " and ", other, "! (simulated, ", name_, ")");
  }

  IValue convert(size_t i) {
    const IValue& value = given_[i];
    const c10::Argument& argument = schema_.arguments()[i];
    bool is_write = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) return convert(value.toTensor(), is_write, argument.is_out() && is_write);
    if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(convert(tensor, is_write));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<optional<Tensor>> tensors;
      for (const optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor && tensor->defined())
          is_masked_ |= tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte;
        tensors.push_back(tensor ? optional<Tensor>(convert(*tensor, is_write)) : std::nullopt);
      }
      return tensors;
    }
    if (value.isDevice()) return Device(c10::kCPU);
    if (argument.name() == "generator") return generator(value);
    return value;
  }

  Tensor convert(const Tensor& tensor, bool is_write, bool is_out = false) {
    if (!tensor.defined()) return tensor;
    if (!is_simulated(tensor)) {
      if (!tensor.device().is_cpu() || !tensor.dim() || !tensor.numel()) return tensor;
      if (kIndexing.count(name_))
        wait("an index on the CPU");
      else if (!may_mix_)
        refuse("cpu");
      return tensor;
    }
    if (tensor.device().index() != device_ && !kIndexing.count(name_)) refuse(tensor.device().str());
    (is_write ? writes_ : reads_).push_back(tensor);
    // What is written to `out=` may be resized, which a tensor over given memory cannot be.
    Tensor here = is_out ? at::empty({0}, tensor.options().device(c10::kCPU)) : on_cpu(tensor);
    if (is_write) written_.emplace_back(tensor, here);
    return here;
  }

  IValue generator(const IValue& value) {
    at::Generator given = value.isNone() ? default_generators[device_] : value.toGenerator();
    TORCH_CHECK(given.device().is_cuda(), "Expected a 'cuda' device type for generator but found ",
                given.device(), " (simulated, ", name_, ")");
    if (given.device().index() != device_)
      report("generator", name_ + " on cuda:" + std::to_string(device_) + " with a generator of " +
                              given.device().str());
    return static_cast<Generator*>(given.unsafeGetGeneratorImpl())->inner;
  }

  static void keep(const Tensor& tensor, const Tensor& result) {
    if (result.sizes() == tensor.sizes() && result.data_ptr() == tensor.data_ptr()) return;
    if (result.sizes() != tensor.sizes()) resize_(tensor, result.sizes(), std::nullopt);
    if (result.numel()) on_cpu(tensor).copy_(result);
  }

  IValue result(const c10::Argument& returned, const IValue& value, bool has_waited) {
    const c10::AliasInfo* alias = returned.alias_info();
    if (alias && alias->isWrite())
      for (size_t i = 0; i < given_.size(); i++) {
        const c10::AliasInfo* other = schema_.arguments()[i].alias_info();
        if (other && *other == *alias) return given_[i];
      }
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(to_device(tensor));
      return tensors;
    }
    // A number that was computed on the device.
    if (!value.isNone() && !has_waited) wait(name_);
    return value;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    Tensor made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {},
                                Device(c10::kCUDA, device_), {});
    if (!tensor.numel()) return made;
    size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                    tensor.dtype().itemsize());
    memcpy(made.data_ptr(), tensor.data_ptr(), bytes);
    enqueue(name_, device_, {}, {made});
    return made;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::string name_;
  std::vector<IValue> given_;
  DeviceIndex device_;
  bool may_mix_ = false, is_masked_ = false;
  std::vector<Tensor> reads_, writes_;
  std::vector<std::pair<Tensor, Tensor>> written_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace simulated

// --- Registration --------------------------------------------------------------------------------

namespace at {
namespace {
using CUDAHooks = simulated::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace
}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, simulated::Guard);
}

namespace {
const bool registered = [] {
  c10::SetAllocator(c10::kCUDA, &simulated::device_allocator);
  at::setHostAllocator(c10::kCUDA, &simulated::host_allocator, 1);
  return true;
}();
}  // namespace

#define RUN_ON_CPU torch::CppFunction::makeFromBoxedFunction<&simulated::run_on_cpu>()

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(RUN_ON_CPU); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", simulated::empty);
  library.impl("empty_strided", simulated::empty_strided);
  library.impl("copy_", simulated::copy_);
  library.impl("_local_scalar_dense", simulated::local_scalar_dense);
  library.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                                std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  library.impl("view", [](const at::Tensor& self, at::IntArrayRef size) {
    return at::native::view(self, size);
  });
  library.impl("_reshape_alias",
               [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
                 return at::native::_reshape_alias(self, size, stride);
               });
  library.impl("unfold", [](const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(self, dimension, size, step);
  });
  library.impl("record_stream", simulated::record_stream);
  library.impl("resize_", simulated::resize_);
  library.impl("set_.source_Storage_storage_offset", simulated::set_storage);
  library.impl("set_.source_Storage", simulated::set_whole_storage);
  // torch decomposes these for a backend that has none; the CPU's are whole.
  library.impl("convolution_overrideable", RUN_ON_CPU);
  library.impl("convolution_backward_overrideable", RUN_ON_CPU);
  library.impl("convolution", RUN_ON_CPU);
  library.impl("convolution_backward", RUN_ON_CPU);
  library.impl("_convolution", RUN_ON_CPU);
}

// --- What devices.py calls ---------------------------------------------------------------------

extern "C" {
using namespace simulated;

void sim_set_callback(Callback given) { callback = given; }
int sim_device_count() { return num_devices; }
int sim_current_device() { return current_device; }
void sim_set_device(int device) { current_device = device; }
int64_t sim_current_stream(int device) { return current_stream_id(device); }
void sim_set_stream(int device, int64_t id) {
  current_streams[device] = id;
  current_device = device;
}
void sim_synchronize(int device) {
  Lock lock(mutex);
  synchronize(device);
}
void sim_next_generator_is_default() { next_generator_is_default = true; }
void sim_empty_host_cache() { host_allocator.empty_cache(); }
void sim_empty_cache() {
  Lock lock(mutex);
  free_unused();
}
uint64_t sim_memory(int which, int device) {
  Lock lock(mutex);
  const Usage& used = usage[device];
  const uint64_t all[] = {used.reserved, used.allocated, used.max_allocated, used.max_reserved,
                          total_bytes};
  return all[which];
}
void sim_set_operation_s(double seconds) { operation_s = seconds; }
uint64_t sim_page_locked() {
  Lock lock(mutex);
  uint64_t bytes = 0;
  for (auto& [_, block] : host_blocks) bytes += block.bytes;
  return bytes;
}
// `given` is a c10::StorageImpl of a device.
void sim_resize_storage(void* given, size_t bytes) {
  auto* storage = static_cast<c10::StorageImpl*>(given);
  Device device = storage->device();
  c10::DataPtr data(nullptr, device);
  if (bytes) data = device_allocator.allocate_on(bytes, device.index());
  if (size_t kept = std::min(bytes, storage->nbytes())) memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}
void sim_reset_peak(int device) {
  Lock lock(mutex);
  usage[device].max_allocated = usage[device].allocated;
  usage[device].max_reserved = usage[device].reserved;
}
void sim_verify() {
  Lock lock(mutex);
  check_uploads();
}
}
