// Runs the operators of a library of kernels without torch: calls come on the standard input, answers leave on the
// standard output. So a library for another processor can be called where torch is (plugin.py), through an emulator or
// a remote shell.
//
//   driver LIBRARY
//
// The first part is as much of torch's C functions as the library asks for: a tensor is a view of bytes, an operator is
// a name and a function. The second part is the calls. All numbers are little-endian; see plugin.py for the other side.

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Memory {
  char* data;
  void (*free_it)(void*, void*);
  void* context;
  ~Memory() { free_it(data, context); }
};

struct TensorView {
  std::shared_ptr<Memory> memory;
  char* data;
  int32_t dtype;
  std::vector<int64_t> sizes, strides;

  int64_t count() const {
    int64_t n = 1;
    for (int64_t size : sizes) n *= size;
    return n;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (size_t d = sizes.size(); d-- > 0; expected *= sizes[d]) {
      if (sizes[d] != 1 && strides[d] != expected && count() > 0) return false;
    }
    return true;
  }
};

using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);
std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> by_name;
  return by_name;
}

const TensorView& view(AtenTensorHandle handle) { return *reinterpret_cast<TensorView*>(handle); }
AtenTensorHandle handle_of(TensorView tensor) {
  return reinterpret_cast<AtenTensorHandle>(new TensorView(std::move(tensor)));
}
using List = std::vector<StableIValue>;

// Bytes of one element, by torch's numbers of types.
size_t element_bytes(int32_t dtype) {
  switch (dtype) {
    case 0: case 1: case 11: case 23: case 24: return 1;
    case 2: case 5: case 15: case 27: return 2;
    case 3: case 6: case 28: return 4;
    case 4: case 7: case 29: return 8;
  }
  throw std::runtime_error("a type of which the driver knows nothing: " + std::to_string(dtype));
}

std::shared_ptr<Memory> allocate(size_t bytes) {
  char* data = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
  return std::shared_ptr<Memory>(new Memory{data, [](void* p, void*) { std::free(p); }, nullptr});
}

TensorView contiguous(const TensorView& from) {
  const size_t size = element_bytes(from.dtype);
  TensorView to{allocate(from.count() * size), nullptr, from.dtype, from.sizes, {}};
  to.data = to.memory->data;
  to.strides.assign(from.sizes.size(), 1);
  for (size_t d = from.sizes.size(); d-- > 1;) to.strides[d - 1] = to.strides[d] * from.sizes[d];
  std::vector<int64_t> at(from.sizes.size(), 0);
  for (int64_t i = 0, n = from.count(); i < n; ++i) {
    int64_t offset = 0;
    for (size_t d = 0; d < at.size(); ++d) offset += at[d] * from.strides[d];
    std::memcpy(to.data + i * size, from.data + offset * size, size);
    for (size_t d = at.size(); d-- > 0;) {
      if (++at[d] < from.sizes[d]) break;
      at[d] = 0;
    }
  }
  return to;
}

}  // namespace

// ------------------------------------------------------------------------------------------ what torch would be

extern "C" {

uint64_t aoti_torch_abi_version() { return TORCH_ABI_VERSION; }
int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_layout_strided() { return 0; }
int32_t aoti_torch_memory_format_contiguous_format() { return 0; }
size_t aoti_torch_dtype_element_size(int32_t dtype) { return element_bytes(dtype); }

#define DTYPE(NAME, NUMBER) int32_t NAME() { return NUMBER; }
DTYPE(aoti_torch_dtype_uint8, 0)
DTYPE(aoti_torch_dtype_int8, 1)
DTYPE(aoti_torch_dtype_int16, 2)
DTYPE(aoti_torch_dtype_int32, 3)
DTYPE(aoti_torch_dtype_int64, 4)
DTYPE(aoti_torch_dtype_float16, 5)
DTYPE(aoti_torch_dtype_float32, 6)
DTYPE(aoti_torch_dtype_float64, 7)
DTYPE(aoti_torch_dtype_complex32, 8)
DTYPE(aoti_torch_dtype_complex64, 9)
DTYPE(aoti_torch_dtype_complex128, 10)
DTYPE(aoti_torch_dtype_bool, 11)
DTYPE(aoti_torch_dtype_bfloat16, 15)
DTYPE(aoti_torch_dtype_float8_e5m2, 23)
DTYPE(aoti_torch_dtype_float8_e4m3fn, 24)
DTYPE(aoti_torch_dtype_float8_e5m2fnuz, 25)
DTYPE(aoti_torch_dtype_float8_e4m3fnuz, 26)
DTYPE(aoti_torch_dtype_uint16, 27)
DTYPE(aoti_torch_dtype_uint32, 28)
DTYPE(aoti_torch_dtype_uint64, 29)
DTYPE(torch_dtype_float8_e8m0fnu, 44)
DTYPE(torch_dtype_float4_e2m1fn_x2, 45)

AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, TorchLibraryHandle* made) {
  *made = nullptr;
  return 0;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }
AOTITorchError torch_library_impl(TorchLibraryHandle, const char* name, Kernel kernel, uint64_t) {
  kernels()[name] = kernel;
  return 0;
}

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle from, AtenTensorHandle* made) {
  *made = handle_of(view(from));
  return 0;
}
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle handle) {
  delete reinterpret_cast<TensorView*>(handle);
  return 0;
}
AOTITorchError aoti_torch_get_dim(AtenTensorHandle handle, int64_t* dims) {
  *dims = static_cast<int64_t>(view(handle).sizes.size());
  return 0;
}
AOTITorchError aoti_torch_get_numel(AtenTensorHandle handle, int64_t* count) {
  *count = view(handle).count();
  return 0;
}
static size_t place_of(AtenTensorHandle handle, int64_t d) {
  return d < 0 ? view(handle).sizes.size() + d : static_cast<size_t>(d);
}
AOTITorchError aoti_torch_get_size(AtenTensorHandle handle, int64_t d, int64_t* size) {
  *size = view(handle).sizes.at(place_of(handle, d));
  return 0;
}
AOTITorchError aoti_torch_get_stride(AtenTensorHandle handle, int64_t d, int64_t* stride) {
  *stride = view(handle).strides.at(place_of(handle, d));
  return 0;
}
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle handle, int32_t* dtype) {
  *dtype = view(handle).dtype;
  return 0;
}
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* type) {
  *type = 0;
  return 0;
}
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle handle, bool* is_contiguous) {
  *is_contiguous = view(handle).is_contiguous();
  return 0;
}
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle handle, void** data) {
  *data = view(handle).data;
  return 0;
}
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle handle, const void** data) {
  *data = view(handle).data;
  return 0;
}
AOTITorchError aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t, int32_t, AtenTensorHandle* made) {
  TensorView tensor{nullptr, nullptr, dtype, {sizes, sizes + dims}, {strides, strides + dims}};
  int64_t last = 1;
  for (int64_t d = 0; d < dims; ++d) last += sizes[d] > 0 ? (sizes[d] - 1) * strides[d] : 0;
  const size_t bytes = last * element_bytes(dtype);
  tensor.memory = allocate(bytes);
  tensor.data = tensor.memory->data;
  std::memset(tensor.data, 0xa5, bytes);  // whatever nobody writes is seen
  *made = handle_of(std::move(tensor));
  return 0;
}
AOTITorchError torch_from_blob(void* data, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t,
                               int32_t dtype, int32_t, int32_t, AtenTensorHandle* made, int32_t, const uint8_t*, int64_t,
                               void (*free_it)(void*, void*), void* context) {
  std::shared_ptr<Memory> memory(new Memory{static_cast<char*>(data), free_it, context});
  *made = handle_of({memory, memory->data, dtype, {sizes, sizes + dims}, {strides, strides + dims}});
  return 0;
}
AOTITorchError torch_list_size(StableListHandle list, size_t* size) {
  *size = reinterpret_cast<List*>(list)->size();
  return 0;
}
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* item) {
  *item = reinterpret_cast<List*>(list)->at(index);
  return 0;
}
AOTITorchError torch_delete_list(StableListHandle list) {
  delete reinterpret_cast<List*>(list);
  return 0;
}
AOTITorchError torch_call_dispatcher(const char* name, const char*, StableIValue* stack, uint64_t) {
  if (std::strcmp(name, "aten::contiguous") != 0) throw std::runtime_error(std::string("no ") + name + " here");
  AtenTensorHandle from = reinterpret_cast<AtenTensorHandle>(stack[0]);
  stack[0] = reinterpret_cast<StableIValue>(handle_of(view(from).is_contiguous() ? view(from) : contiguous(view(from))));
  aoti_torch_delete_tensor_object(from);
  return 0;
}

}  // extern "C"

// ------------------------------------------------------------------------------------------ calls

namespace {

void take(void* to, size_t bytes) {
  if (bytes > 0 && std::fread(to, 1, bytes, stdin) != bytes) std::exit(0);  // the other side has ended
}
template <class T> T take() {
  T value;
  take(&value, sizeof(value));
  return value;
}
std::string take_text() {
  std::string text(take<uint32_t>(), ' ');
  take(text.data(), text.size());
  return text;
}
void give(const void* from, size_t bytes) { std::fwrite(from, 1, bytes, stdout); }
template <class T> void give(T value) { give(&value, sizeof(value)); }
void give_text(const std::string& text) {
  give(static_cast<uint32_t>(text.size()));
  give(text.data(), text.size());
}

// Memory of the other side, between bytes that nobody may write.
struct Storage {
  static constexpr size_t GUARD = 256;
  std::shared_ptr<Memory> memory;
  std::vector<char> before;
  size_t bytes;

  explicit Storage(size_t n) : memory(allocate(n + 2 * GUARD)), bytes(n) {
    std::memset(memory->data, 0xee, n + 2 * GUARD);
    take(data(), n);
    before.assign(data(), data() + n);
  }
  char* data() const { return memory->data + GUARD; }
  bool is_hurt() const {
    for (size_t i = 0; i < GUARD; ++i) {
      if (data()[-1 - static_cast<int64_t>(i)] != '\xee' || data()[bytes + i] != '\xee') return true;
    }
    return false;
  }
};

class Call {
 public:
  Call() : name_(take_text()) {
    for (uint32_t i = 0, n = take<uint32_t>(); i < n; ++i) storages_.emplace_back(take<uint64_t>());
    for (uint32_t i = 0, n = take<uint32_t>(); i < n; ++i) stack_.push_back(argument());
    num_arguments_ = stack_.size();
    num_results_ = take<uint32_t>();
    stack_.resize(std::max<size_t>(num_arguments_, num_results_) + 1);
  }

  void run() {
    const auto kernel = kernels().find(name_);
    if (kernel == kernels().end()) throw std::runtime_error("the library has no " + name_);
    kernel->second(stack_.data(), num_arguments_, num_results_);
    for (const Storage& storage : storages_) {
      if (storage.is_hurt()) throw std::runtime_error(name_ + " has written beyond a tensor");
    }
  }

  void give_results() {
    for (const Storage& storage : storages_) {
      const bool is_changed = std::memcmp(storage.data(), storage.before.data(), storage.bytes) != 0;
      give(static_cast<uint8_t>(is_changed));
      if (is_changed) give(storage.data(), storage.bytes);
    }
    for (uint32_t i = 0; i < num_results_; ++i) {
      const auto handle = reinterpret_cast<AtenTensorHandle>(stack_[i]);
      const TensorView result = contiguous(view(handle));
      give(result.dtype);
      give(static_cast<uint32_t>(result.sizes.size()));
      give(result.sizes.data(), result.sizes.size() * 8);
      give(result.data, result.count() * element_bytes(result.dtype));
      aoti_torch_delete_tensor_object(handle);
    }
  }

 private:
  StableIValue tensor() {
    const Storage& storage = storages_.at(take<uint32_t>());
    TensorView made{storage.memory, storage.data() + take<uint64_t>(), take<int32_t>(), {}, {}};
    const uint32_t dims = take<uint32_t>();
    made.sizes.resize(dims), made.strides.resize(dims);
    take(made.sizes.data(), dims * 8), take(made.strides.data(), dims * 8);
    return reinterpret_cast<StableIValue>(handle_of(std::move(made)));
  }

  // As torch hands them over: 64 bits, or the address of what does not fit, which the kernel frees.
  StableIValue argument() {
    switch (const char kind = take<char>()) {
      case '?': return take<uint8_t>() == 0 ? 0 : reinterpret_cast<StableIValue>(new StableIValue(argument()));
      case 't': return tensor();
      case 'i': return take<uint64_t>();  // integers, floats, truth and types
      case 'l': {
        auto* list = new List;
        for (uint32_t i = 0, n = take<uint32_t>(); i < n; ++i) list->push_back(argument());
        return reinterpret_cast<StableIValue>(list);
      }
      default: throw std::runtime_error(std::string("no kind of argument: ") + kind);
    }
  }

  std::string name_;
  std::vector<Storage> storages_;
  std::vector<StableIValue> stack_;
  size_t num_arguments_;
  uint32_t num_results_;
};

void call_operator() {
  std::string fault;
  Call call;
  try {
    call.run();
  } catch (const std::exception& error) {
    fault = error.what();
    if (fault.empty()) fault = "an error without words";
  }
  give_text(fault);
  if (fault.empty()) call.give_results();
}

template <class F> F function(void* library, const char* name) { return reinterpret_cast<F>(dlsym(library, name)); }

}  // namespace

int main(int count, char** arguments) {
  void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  if (library == nullptr) {
    std::fprintf(stderr, "driver LIBRARY: %s\n", count == 2 ? dlerror() : "one argument is needed");
    return 1;
  }
  for (;;) {
    switch (take<char>()) {
      case 'c': call_operator(); break;
      case 's':
        give(function<int (*)(const char*)>(library, "quire_select_isa")(take_text().c_str()));
        break;
      case 'n': give_text(function<const char* (*)()>(library, "quire_isa")()); break;
      case 'h': function<void (*)(int, const int*)>(library, "quire_set_crew")(take<int32_t>(), nullptr); break;
      default: return 1;
    }
    std::fflush(stdout);
  }
}
