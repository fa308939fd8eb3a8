// Operators on packed weights: packing, products, rows.

#include <malloc.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "matmul_pack.h"
#include "operators.h"
#include "tuning.h"

namespace quire {
namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
// Weights share regions of so many bytes: many are smaller than a huge page, or end in the middle of one.
constexpr int64_t REGION_BYTES = 512 << 20;
// Smaller ones do not matter.
constexpr int64_t SMALLEST_IN_REGION = 128 << 10;

// Address space in huge pages, given back when the last weight in it is gone. Nothing is committed before it is written.
class Region {
 public:
  explicit Region(int64_t bytes) : length_(round_up(bytes, HUGE_PAGE)), weights_of_page_(length_ / HUGE_PAGE) {
    void* got = mmap(nullptr, length_ + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                     -1, 0);
    STD_TORCH_CHECK(got != MAP_FAILED, "no memory for a packed weight of ", bytes, " bytes");
    mapped_ = static_cast<char*>(got);
    data_ = mapped_ + (HUGE_PAGE - reinterpret_cast<uintptr_t>(mapped_) % HUGE_PAGE) % HUGE_PAGE;
    madvise(data_, length_, MADV_HUGEPAGE);
  }
  Region(const Region&) = delete;
  ~Region() { munmap(mapped_, length_ + HUGE_PAGE); }

  // Null if there is no room.
  char* take(int64_t bytes) {
    if (used_ + bytes > length_) return nullptr;
    char* data = data_ + used_;
    for (int64_t page = used_ / HUGE_PAGE; page <= (used_ + bytes - 1) / HUGE_PAGE; ++page) ++weights_of_page_[page];
    used_ += round_up(bytes, 64);
    return data;
  }

  // Pages that no other weight has a part of go back to the system, even while others keep the region.
  void give_back(char* data, int64_t bytes) {
    const int64_t first = data - data_;
    for (int64_t page = first / HUGE_PAGE; page <= (first + bytes - 1) / HUGE_PAGE; ++page) {
      if (--weights_of_page_[page] == 0) madvise(data_ + page * HUGE_PAGE, HUGE_PAGE, MADV_DONTNEED);
    }
  }

 private:
  int64_t length_, used_ = 0;
  std::vector<int> weights_of_page_;
  char *mapped_, *data_;
};

std::mutex regions_lock;

Tensor empty_bytes(int64_t bytes) {
  if (bytes < SMALLEST_IN_REGION) return empty({bytes}, ScalarType::Byte);
  // The plain weight that was packed before this one is free by now, but the heap keeps its pages unless it is told.
  if (bytes >= HUGE_PAGE) malloc_trim(0);
  static std::weak_ptr<Region> last;
  std::lock_guard<std::mutex> one_at_a_time(regions_lock);
  std::shared_ptr<Region> region = last.lock();
  char* data = region != nullptr ? region->take(bytes) : nullptr;
  if (data == nullptr) {
    region = std::make_shared<Region>(max64(bytes, REGION_BYTES));
    data = region->take(bytes);
    last = region;
  }
  const int64_t sizes[] = {bytes}, strides[] = {1};
  return torch::stable::from_blob(data, {sizes, 1}, {strides, 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte,
                                  [region, bytes](void* p) {
                                    std::lock_guard<std::mutex> alone(regions_lock);
                                    region->give_back(static_cast<char*>(p), bytes);
                                  });
}

PackedHeader header_of(const Tensor& packed) {
  STD_TORCH_CHECK(packed.is_cpu() && packed.dim() == 1 && packed.scalar_type() == ScalarType::Byte &&
                      packed.is_contiguous() && packed.size(0) >= static_cast<int64_t>(sizeof(PackedHeader)),
                  "a packed weight is a contiguous vector of bytes on the CPU");
  PackedHeader header;
  std::memcpy(&header, packed.const_data_ptr(), sizeof(header));
  const char* fault = fault_of(header, packed.size(0));
  STD_TORCH_CHECK(fault == nullptr, fault);
  return header;
}

PackedView view_of(const Tensor& packed) {
  const char* data = static_cast<const char*>(packed.const_data_ptr());
  return view_of(header_of(packed), const_cast<char*>(data) + sizeof(PackedHeader));
}

Tensor packed_tensor(const PackedHeader& header) {
  Tensor packed = empty_bytes(packed_bytes(header));
  std::memcpy(packed.mutable_data_ptr(), &header, sizeof(header));
  return packed;
}

template <class Pack> void over_panels(const PackedView& view, Pack pack) {
  run_crew(crew_size(), [&](Crew& crew) {
    crew.for_each(view.num_panels, 1, [&](int64_t begin, int64_t end) { pack(begin, end); });
  });
}

Tensor pack_weight_op(const Tensor& any_weight) {
  STD_TORCH_CHECK(any_weight.is_cpu() && any_weight.dim() == 2, "weight must be a matrix on the CPU");
  const bool has_rows = any_weight.stride(1) == 1 || any_weight.size(1) <= 1;
  const Tensor weight = has_rows ? any_weight : torch::stable::contiguous(any_weight);
  const PackedHeader header = float_header(dtype_of(weight), weight.size(0), weight.size(1));
  Tensor packed = packed_tensor(header);
  const PackedView view = view_of(packed);
  const PlainWeight from{static_cast<const char*>(weight.const_data_ptr()),
                         weight.stride(0) * static_cast<int64_t>(weight.element_size())};
  over_panels(view, [&](int64_t begin, int64_t end) { pack_panels(from, view, begin, end); });
  return packed;
}

Tensor pack_quantized_op(const Tensor& values, const Tensor& scales, std::optional<Tensor> offsets, int64_t bits,
                         bool weight_only) {
  STD_TORCH_CHECK(bits == 4 || bits == 6 || bits == 8, "bits must be 4, 6 or 8, not ", bits);
  const bool are_signed = values.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(values.dim() == 2 && values.is_contiguous() && values.is_cpu() &&
                      (are_signed || values.scalar_type() == ScalarType::Byte),
                  "values must be a contiguous matrix of int8 or uint8 on the CPU");
  const int64_t rows = values.size(0), columns = values.size(1);
  STD_TORCH_CHECK(columns > 0, "a quantised weight needs at least one input");
  STD_TORCH_CHECK(scales.dim() == 2 && scales.size(0) == rows && scales.size(1) >= 1, "scales must be [N, groups]");
  const int64_t groups = scales.size(1);
  STD_TORCH_CHECK(groups == 1 || (columns % groups == 0 && columns / groups % 4 == 0), "a group of ", columns, " / ",
                  groups, " inputs: must be a multiple of 4");
  const auto floats = [&](const Tensor& t, const char* name) {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.is_cpu() && t.dim() == 2 &&
                        t.size(0) == rows && t.size(1) == groups,
                    name, " must be a contiguous float32 [N, groups] on the CPU");
    return static_cast<const float*>(t.const_data_ptr());
  };
  const QuantizedWeight from{static_cast<const uint8_t*>(values.const_data_ptr()), are_signed,
                             floats(scales, "scales"), offsets.has_value() ? floats(*offsets, "offsets") : nullptr,
                             rows, columns, groups};
  const char* fault = fault_of(from);
  STD_TORCH_CHECK(fault == nullptr, fault);
  Tensor packed = packed_tensor(quantized_header(from, static_cast<int>(bits), weight_only));
  const PackedView view = view_of(packed);
  std::atomic<bool> are_codes = true;
  over_panels(view, [&](int64_t begin, int64_t end) {
    if (!pack_panels(from, view, begin, end)) are_codes = false;
  });
  STD_TORCH_CHECK(are_codes, bits == 6 ? "values of 6 bits must be -32 to 31, or 0 to 63 in uint8"
                                       : "values of 4 bits in int8 must be 0, 1, 2, 3, 4, 6, 8, 12 or their negatives");
  return packed;
}

// How many blocks tiles of `bytes` each are multiplied in.
int64_t num_blocks(int64_t tiles, int64_t bytes) {
  return min64(tiles, (tiles * bytes + tuning.block_bytes - 1) / tuning.block_bytes);
}

// Pairs of a block and a panel that a thread takes at a time; with few rows, whole numbers of `together`.
int64_t grain_of(int64_t count, const Crew& crew, int64_t together = 1) {
  return round_up(max64(1, min64(16, count / (tuning.pieces * crew.size))), together);
}

const MatmulKernels* kernels_for(const MatmulArgs& args) {
  const MatmulKernels* best = kernels()->matmul;
  return best->suits == nullptr || best->suits(args) ? best : best->otherwise;
}

class LinearStep final : public Step {
 public:
  LinearStep(const MatmulArgs& args, int64_t rows_per_token)
      : args_(args), rows_per_token_(rows_per_token), kernels_(kernels_for(args)),
        row_bytes_(max64(4, round_up(kernels_->prepared_row_bytes(args), 4))) {}  // at least: a weight may have no inputs

  int64_t work(const Extent& extent) const override {
    return extent.tokens * rows_per_token_ * args_.weight.rows * args_.weight.columns;
  }

  void run(const Extent& extent, Crew& crew) const override {
    const int64_t rows = extent.tokens * rows_per_token_;
    if (rows == 0) return crew.barrier();
    if (rows <= kernels_->tile_rows) return multiply_few(rows, crew);
    const int64_t at_once = max64(tuning.prepared_bytes / row_bytes_, 4 * kernels_->tile_rows);
    const int64_t parts = (rows + at_once - 1) / at_once;
    char* prepared = static_cast<char*>(crew.shared_scratch((rows / parts + 1) * row_bytes_ + 64));
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = rows * part / parts;
      multiply_many(from_row(first), rows * (part + 1) / parts - first, prepared, crew);
    }
  }

 private:
  MatmulArgs from_row(int64_t row) const {
    MatmulArgs args = args_;
    const int64_t size = args.dtype == DType::float32 ? 4 : 2;
    args.x = static_cast<const char*>(args.x) + row * args.x_stride * size;
    args.out = static_cast<char*>(args.out) + row * args.out_stride * size;
    return args;
  }

  // Every thread prepares the rows for itself: cheaper than to wait for each other.
  void multiply_few(int64_t rows, Crew& crew) const {
    const Tiles tiles(rows, kernels_->tile_rows);
    const int64_t prepared_bytes = round_up(rows * row_bytes_, 64);
    char* scratch = static_cast<char*>(
        thread_scratch(prepared_bytes + max64(prepared_bytes, kernels_->scratch_bytes(rows))));
    kernels_->prepare(args_, tiles, 0, 1, scratch, scratch + prepared_bytes);
    const int64_t panels = args_.weight.num_panels, grain = grain_of(panels, crew, tuning.panels.of(args_.weight));
    crew.for_each(panels, grain, [&](int64_t begin, int64_t end) {
      kernels_->multiply(args_, tiles, 0, 1, begin, end, scratch, scratch + prepared_bytes);
    });
  }

  void multiply_many(const MatmulArgs& args, int64_t rows, char* prepared, Crew& crew) const {
    const Tiles tiles(rows, kernels_->tile_rows);
    const int64_t tile_bytes = kernels_->tile_rows * row_bytes_;
    const int64_t blocks = num_blocks(tiles.count, tile_bytes);
    const int64_t block_rows = (tiles.count / blocks + 1) * kernels_->tile_rows;
    char* scratch = static_cast<char*>(thread_scratch(max64(tile_bytes, kernels_->scratch_bytes(block_rows))));
    crew.for_each(tiles.count, 1, [&](int64_t begin, int64_t end) {
      kernels_->prepare(args, tiles, begin, end, prepared, scratch);
    });
    const int64_t panels = args.weight.num_panels, count = blocks * panels;
    crew.for_each(count, grain_of(count, crew), [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t block = begin / panels, panel = begin % panels, n = min64(panels - panel, end - begin);
        kernels_->multiply(args, tiles, tiles.count * block / blocks, tiles.count * (block + 1) / blocks, panel,
                           panel + n, prepared, scratch);
        begin += n;
      }
    });
  }

  MatmulArgs args_;
  int64_t rows_per_token_;
  const MatmulKernels* kernels_;
  int64_t row_bytes_;
};

// A product whose sums are formed slice by slice of the inputs, in float32, and added up in a tree: of slices 0 and 1, of
// 2 and 3, then of these two sums, and so on. Ranks that have some of the slices each form parts of the same tree.
class SlicedStep final : public Step {
 public:
  SlicedStep(const MatmulArgs& whole, int64_t num_slices, int64_t rows_per_token)
      : whole_(whole), rows_per_token_(rows_per_token) {
    const int64_t columns = whole.weight.columns / num_slices, size = whole.dtype == DType::float32 ? 4 : 2;
    for (int64_t s = 0; s < num_slices; ++s) {
      MatmulArgs args = whole;
      args.weight = slice_of(whole.weight, s * columns, columns);
      args.x = static_cast<const char*>(whole.x) + s * columns * size;
      args.bias = nullptr, args.out_dtype = DType::float32, args.out_stride = PANEL_COLUMNS;
      slices_.push_back(args);
    }
    // what the sums are turned into has no scales any more
    whole_.weight.panel_head_bytes = 0, whole_.weight.scale_unit = 1;
    kernels_ = kernels_for(slices_[0]);
    row_bytes_ = max64(4, round_up(kernels_->prepared_row_bytes(slices_[0]), 4));
  }

  int64_t work(const Extent& extent) const override {
    return extent.tokens * rows_per_token_ * whole_.weight.rows * whole_.weight.columns;
  }

  void run(const Extent& extent, Crew& crew) const override {
    const int64_t rows = extent.tokens * rows_per_token_;
    if (rows == 0) return crew.barrier();
    const int64_t all_bytes = row_bytes_ * num_slices();
    const int64_t at_once = max64(tuning.prepared_bytes / all_bytes, 4 * kernels_->tile_rows);
    const int64_t parts = (rows + at_once - 1) / at_once;
    char* prepared = static_cast<char*>(crew.shared_scratch((rows / parts + 1) * all_bytes + 64 * num_slices()));
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = rows * part / parts;
      multiply(first, rows * (part + 1) / parts - first, prepared, crew);
    }
  }

 private:
  static constexpr int LEVELS = 7;  // of the tree, for up to 64 slices

  int64_t num_slices() const { return static_cast<int64_t>(slices_.size()); }

  void multiply(int64_t first, int64_t rows, char* prepared, Crew& crew) const {
    const Tiles tiles(rows, kernels_->tile_rows);
    const int64_t tile_bytes = kernels_->tile_rows * row_bytes_, slice_bytes = round_up(rows * row_bytes_, 64);
    const int64_t blocks = num_blocks(tiles.count, tile_bytes * num_slices());
    const int64_t block_rows = (tiles.count / blocks + 1) * kernels_->tile_rows;
    const int64_t level_bytes = block_rows * PANEL_COLUMNS * 4;
    char* scratch = static_cast<char*>(
        thread_scratch(LEVELS * level_bytes + max64(tile_bytes, kernels_->scratch_bytes(block_rows))));
    char* of_kernels = scratch + LEVELS * level_bytes;
    crew.for_each(tiles.count * num_slices(), 1, [&](int64_t begin, int64_t end) {
      for (; begin < end; ++begin) {
        const int64_t s = begin / tiles.count, tile = begin % tiles.count;
        kernels_->prepare(from_row(slices_[s], first), tiles, tile, tile + 1, prepared + s * slice_bytes, of_kernels);
      }
    });
    const int64_t panels = whole_.weight.num_panels, count = blocks * panels;
    crew.for_each(count, grain_of(count, crew), [&](int64_t begin, int64_t end) {
      for (; begin < end; ++begin) {
        const int64_t block = begin / panels, panel = begin % panels;
        const int64_t from = tiles.count * block / blocks, to = tiles.count * (block + 1) / blocks;
        const int64_t row = tiles.first_row(from), num_rows = tiles.first_row(to) - row;
        int depth = 0;
        for (int64_t s = 0; s < num_slices(); ++s) {
          MatmulArgs args = slices_[s];
          args.out = level(scratch, level_bytes, depth++) - row * PANEL_COLUMNS - panel * PANEL_COLUMNS;
          kernels_->multiply(args, tiles, from, to, panel, panel + 1, prepared + s * slice_bytes, of_kernels);
          for (int64_t pairs = s; pairs & 1; pairs >>= 1) --depth, add_level(scratch, level_bytes, depth, num_rows);
        }
        while (depth > 1) --depth, add_level(scratch, level_bytes, depth, num_rows);
        kernels_->finish(from_row(whole_, first), panel, level(scratch, level_bytes, 0), row, num_rows);
      }
    });
  }

  static float* level(char* scratch, int64_t bytes, int depth) { return reinterpret_cast<float*>(scratch + depth * bytes); }
  static void add_level(char* scratch, int64_t bytes, int depth, int64_t rows) {
    float* to = level(scratch, bytes, depth - 1);
    const float* from = level(scratch, bytes, depth);
    for (int64_t i = 0; i < rows * PANEL_COLUMNS; ++i) to[i] += from[i];
  }

  static MatmulArgs from_row(MatmulArgs args, int64_t row) {
    args.x = static_cast<const char*>(args.x) + row * args.x_stride * (args.dtype == DType::float32 ? 4 : 2);
    args.out = static_cast<char*>(args.out) + row * args.out_stride * (args.out_dtype == DType::float32 ? 4 : 2);
    return args;
  }

  MatmulArgs whole_;
  std::vector<MatmulArgs> slices_;
  int64_t rows_per_token_;
  const MatmulKernels* kernels_;
  int64_t row_bytes_;
};

// Rows of x by pairs of a token and one of its experts: each is multiplied with the weight of its expert. The pairs of
// an expert stand together, in the order of tokens, and a run is some of them. Behind all of them stand the pairs whose
// expert is not here: their rows are zeros.
class GroupedStep final : public Step {
 public:
  // `experts` have everything but the rows, and are those from number `first` on; `ids` are [tokens, top_k], or null:
  // pair (t, k) is sent to k. A row of x belongs to a token or to a pair. `counts` (of so many experts, or null) grow by
  // the rows of each expert, here or not.
  GroupedStep(std::vector<MatmulArgs> experts, int64_t first, const int32_t* ids, int64_t top_k, bool has_row_per_pair,
              int64_t* counts, int64_t num_counts)
      : experts_(std::move(experts)), first_(first), ids_(ids), top_k_(top_k), has_row_per_pair_(has_row_per_pair),
        counts_(counts), num_counts_(num_counts), kernels_(kernels_for(experts_[0])),
        row_bytes_(max64(4, round_up(kernels_->prepared_row_bytes(experts_[0]), 4))) {}

  int64_t work(const Extent& extent) const override {
    return extent.tokens * top_k_ * experts_[0].weight.rows * experts_[0].weight.columns;
  }

  void run(const Extent& extent, Crew& crew) const override {
    const int64_t num_pairs = extent.tokens * top_k_;
    if (num_pairs == 0) return crew.barrier();
    // cheaper than to wait until one thread has done it for all
    static thread_local Order order;
    sort(num_pairs, order);
    if (counts_ != nullptr && crew.rank == 0) count(num_pairs);
    const int64_t num_here = order.starts[experts_.size()], num_elsewhere = num_pairs - num_here;
    for (int64_t i = num_elsewhere * crew.rank / crew.size; i < num_elsewhere * (crew.rank + 1) / crew.size; ++i) {
      clear_row(order.out_rows[num_here + i]);
    }
    if (num_here == 0) return crew.barrier();
    std::vector<Run>& runs = order.runs;
    runs.clear();
    if (num_here <= kernels_->tile_rows) return multiply_few(order, extent, crew);
    const int64_t at_once = max64(tuning.prepared_bytes / row_bytes_, 4 * kernels_->tile_rows);
    char* prepared = static_cast<char*>(crew.shared_scratch(min64(num_pairs, 2 * at_once) * row_bytes_ + 64));
    int64_t rows = 0;
    for (size_t e = 0; e < experts_.size(); ++e) {
      for (int64_t row = order.starts[e], end = order.starts[e + 1]; row < end;) {
        const int64_t count = min64(at_once, end - row);
        if (rows + count > 2 * at_once) multiply(runs, prepared, crew), runs.clear(), rows = 0;
        runs.emplace_back(*this, experts_[e], order, row, count, rows, runs.empty() ? nullptr : &runs.back());
        rows += count, row += count;
      }
    }
    multiply(runs, prepared, crew);
  }

 private:
  struct Run;
  struct Order {
    std::vector<int32_t> starts, x_rows, out_rows;
    std::vector<Run> runs;
  };

  // Rows of one expert, with the numbers of tiles and of pieces of work before it.
  struct Run {
    Run(const GroupedStep& step, const MatmulArgs& expert, const Order& order, int64_t row, int64_t count,
        int64_t place, const Run* before)
        : args(expert), tiles(count, step.kernels_->tile_rows), first_row(place) {
      args.x_rows = order.x_rows.data() + row, args.out_rows = order.out_rows.data() + row;
      const int64_t tile_bytes = step.kernels_->tile_rows * step.row_bytes_;
      blocks = num_blocks(tiles.count, tile_bytes);
      first_tile = before == nullptr ? 0 : before->end_tile(), first_piece = before == nullptr ? 0 : before->end_piece();
    }
    int64_t end_tile() const { return first_tile + tiles.count; }
    int64_t end_piece() const { return first_piece + blocks * args.weight.num_panels; }

    MatmulArgs args;
    Tiles tiles;
    int64_t blocks, first_row, first_tile, first_piece;
  };

  void count(int64_t num_pairs) const {
    for (int64_t i = 0; i < num_pairs; ++i) {
      const int64_t id = id_of(i);
      if (0 <= id && id < num_counts_) ++counts_[id];
    }
  }

  void clear_row(int64_t row) const {
    const MatmulArgs& like = experts_[0];
    const int64_t row_bytes = like.out_stride * (like.out_dtype == DType::float32 ? 4 : 2);
    std::memset(static_cast<char*>(like.out) + row * row_bytes, 0, row_bytes);
  }

  void sort(int64_t num_pairs, Order& order) const {
    const size_t n = experts_.size() + 1;
    order.starts.assign(n + 1, 0);
    order.x_rows.resize(num_pairs), order.out_rows.resize(num_pairs);
    for (int64_t i = 0; i < num_pairs; ++i) ++order.starts[expert_of(i) + 1];
    for (size_t e = 0; e < n; ++e) order.starts[e + 1] += order.starts[e];
    for (int64_t i = 0; i < num_pairs; ++i) {
      const int32_t place = order.starts[expert_of(i)]++;
      order.x_rows[place] = static_cast<int32_t>(has_row_per_pair_ ? i : i / top_k_);
      order.out_rows[place] = static_cast<int32_t>(i);
    }
    // each start has become the next one's
    for (size_t e = n; e > 0; --e) order.starts[e] = order.starts[e - 1];
    order.starts[0] = 0;
  }

  int64_t id_of(int64_t pair) const { return ids_ == nullptr ? pair % top_k_ : ids_[pair]; }

  // Ids are made by the same program, so that nobody can look at them before: a wrong one, too, is that of an expert
  // which is not here.
  size_t expert_of(int64_t pair) const {
    const int64_t number = id_of(pair) - first_, num_experts = static_cast<int64_t>(experts_.size());
    return static_cast<size_t>(number < 0 || number >= num_experts ? num_experts : number);
  }

  // As of other products with few rows, every thread prepares them for itself; a single token's row once for all experts.
  void multiply_few(Order& order, const Extent& extent, Crew& crew) const {
    std::vector<Run>& runs = order.runs;
    for (size_t e = 0; e < experts_.size(); ++e) {
      const int64_t row = order.starts[e], count = order.starts[e + 1] - row;
      if (count > 0) runs.emplace_back(*this, experts_[e], order, row, count, row, runs.empty() ? nullptr : &runs.back());
    }
    const int64_t num_rows = order.starts[experts_.size()], prepared_bytes = round_up(num_rows * row_bytes_, 64);
    char* prepared = static_cast<char*>(thread_scratch(prepared_bytes + scratch_bytes(runs)));
    char* scratch = prepared + prepared_bytes;
    const bool are_one_row = extent.tokens == 1 && !has_row_per_pair_ && static_cast<int64_t>(runs.size()) == num_rows;
    for (Run& run : runs) {
      if (are_one_row) run.first_row = 0;
      if (are_one_row && &run != &runs.front()) continue;
      kernels_->prepare(run.args, run.tiles, 0, run.tiles.count, prepared + run.first_row * row_bytes_, scratch);
    }
    multiply_prepared(runs, prepared, scratch, crew);
  }

  int64_t scratch_bytes(const std::vector<Run>& runs) const {
    int64_t bytes = kernels_->tile_rows * row_bytes_;
    for (const Run& run : runs) {
      const int64_t rows = (run.tiles.count / run.blocks + 1) * kernels_->tile_rows;
      bytes = max64(bytes, kernels_->scratch_bytes(rows));
    }
    return bytes;
  }

  void multiply(const std::vector<Run>& runs, char* prepared, Crew& crew) const {
    if (runs.empty()) return;
    char* scratch = static_cast<char*>(thread_scratch(scratch_bytes(runs)));
    crew.for_each(runs.back().end_tile(), 1, [&](int64_t begin, int64_t end) {
      for (const Run* run = at(runs, begin, &Run::end_tile); begin < end; ++run) {
        const int64_t first = begin - run->first_tile, last = min64(end, run->end_tile()) - run->first_tile;
        kernels_->prepare(run->args, run->tiles, first, last, prepared + run->first_row * row_bytes_, scratch);
        begin += last - first;
      }
    });
    multiply_prepared(runs, prepared, scratch, crew);
  }

  void multiply_prepared(const std::vector<Run>& runs, const char* prepared, char* scratch, Crew& crew) const {
    const int64_t panels = experts_[0].weight.num_panels, count = runs.back().end_piece();
    crew.for_each(count, grain_of(count, crew, tuning.panels.of(experts_[0].weight)), [&](int64_t begin, int64_t end) {
      for (const Run* run = at(runs, begin, &Run::end_piece); begin < end;) {
        const int64_t piece = begin - run->first_piece, block = piece / panels, panel = piece % panels;
        const int64_t n = min64(panels - panel, end - begin), blocks = run->blocks;
        kernels_->multiply(run->args, run->tiles, run->tiles.count * block / blocks,
                           run->tiles.count * (block + 1) / blocks, panel, panel + n,
                           prepared + run->first_row * row_bytes_, scratch);
        begin += n;
        if (begin == run->end_piece()) ++run;
      }
    });
  }

  // The run that the piece or tile of this number belongs to.
  static const Run* at(const std::vector<Run>& runs, int64_t number, int64_t (Run::*end)() const) {
    const Run* run = runs.data();
    while ((run->*end)() <= number) ++run;
    return run;
  }

  std::vector<MatmulArgs> experts_;
  int64_t first_;
  const int32_t* ids_;
  int64_t top_k_;
  bool has_row_per_pair_;
  int64_t* counts_;
  int64_t num_counts_;
  const MatmulKernels* kernels_;
  int64_t row_bytes_;
};

Arithmetic arithmetic_of(const PackedView& weight, DType dtype) {
  if (weight.is_quantized() && !weight.is_weight_only) return Arithmetic::int8;
  const bool is_bfloat16 = weight.is_quantized() || weight.format == WeightFormat::bfloat16;
  const bool multiplies = kernels()->matmul->multiplies_bfloat16;
  return is_bfloat16 && dtype == DType::bfloat16 && multiplies ? Arithmetic::bfloat16 : Arithmetic::float32;
}

// Rows that follow each other at one distance. Other strides occur in models that were not written for Quire.
bool are_rows(const Tensor& x) {
  const int64_t n = x.dim();
  if (x.size(n - 1) > 1 && x.stride(n - 1) != 1) return false;
  int64_t expected = 0;
  for (int64_t d = n - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (expected != 0 && x.stride(d) != expected) return false;
    expected = x.stride(d) * x.size(d);
  }
  return true;
}

void take_bias(const Tensor& bias, int64_t num_rows, MatmulArgs& args) {
  STD_TORCH_CHECK(bias.is_cpu() && bias.dim() == 1 && bias.size(0) == num_rows && bias.is_contiguous(),
                  "bias must be a contiguous vector on the CPU, a value for each row of the weight");
  args.bias = bias.const_data_ptr(), args.bias_dtype = dtype_of(bias);
}

// Without slices each sum is one chain over all inputs.
Tensor product(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias, int64_t num_rows,
               int64_t num_slices, ScalarType dtype) {
  STD_TORCH_CHECK(input.is_cpu() && input.dim() >= 1, "x must be on the CPU, with at least one dimension");
  STD_TORCH_CHECK(are_rows(input) || !is_recording(), "x: strides are not supported");
  const Tensor x = are_rows(input) ? input : torch::stable::contiguous(input);
  MatmulArgs args{};
  args.weight = view_of(packed);
  STD_TORCH_CHECK(x.size(x.dim() - 1) == args.weight.columns, "x has ", x.size(x.dim() - 1), " columns, the weight ",
                  args.weight.columns);
  STD_TORCH_CHECK(num_rows == args.weight.rows, "the weight has ", args.weight.rows, " rows, not ", num_rows);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = num_rows;
  Tensor out = empty(sizes, dtype);
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < sizes.size(); ++d) {
    rows *= sizes[d];
    if (sizes[d] != 1) args.x_stride = x.stride(static_cast<int64_t>(d));
  }
  args.dtype = dtype_of(x), args.out_dtype = dtype_of(out);
  args.arithmetic = arithmetic_of(args.weight, args.dtype);
  args.x = x.const_data_ptr(), args.out = out.mutable_data_ptr(), args.out_stride = num_rows;
  if (bias.has_value()) take_bias(*bias, num_rows, args);
  const int64_t tokens = sizes.size() == 1 ? 1 : sizes[0];
  const int64_t rows_per_token = tokens > 0 ? rows / tokens : 1;
  if (rows == 0 && !is_recording()) return out;
  if (num_slices == 0) {
    perform(std::make_unique<LinearStep>(args, rows_per_token), {tokens, 0});
  } else {
    perform(std::make_unique<SlicedStep>(args, num_slices, rows_per_token), {tokens, 0});
  }
  return out;
}

Tensor packed_linear_op(const Tensor& x, const Tensor& packed, std::optional<Tensor> bias, int64_t num_rows) {
  return product(x, packed, bias, num_rows, 0, x.scalar_type());
}

Tensor sliced_linear_op(const Tensor& x, const Tensor& packed, std::optional<Tensor> bias, int64_t num_rows,
                        int64_t num_slices, ScalarType dtype) {
  const char* fault = num_slices > 64 ? "a weight has up to 64 slices" : fault_of_slices(view_of(packed), num_slices);
  STD_TORCH_CHECK(fault == nullptr, fault);
  return product(x, packed, bias, num_rows, num_slices == 1 ? 0 : num_slices, dtype);
}

Tensor grouped_linear_op(const Tensor& x, std::optional<Tensor> ids, const std::vector<Tensor>& packed,
                         const std::vector<Tensor>& biases, int64_t num_rows, std::optional<Tensor> counts,
                         int64_t first) {
  STD_TORCH_CHECK(!packed.empty(), "there must be at least one expert");
  STD_TORCH_CHECK(!ids.has_value() || (ids->is_cpu() && ids->dim() == 2 && ids->scalar_type() == ScalarType::Int &&
                                       ids->is_contiguous()),
                  "ids must be a contiguous int32 tensor [tokens, experts of a token] on the CPU");
  const int64_t num_experts = static_cast<int64_t>(packed.size());
  const int64_t tokens = x.size(0), top_k = ids.has_value() ? ids->size(1) : num_experts;
  const bool has_row_per_pair = x.dim() == 3;
  STD_TORCH_CHECK(x.is_cpu() && (x.dim() == 2 || x.dim() == 3) && (!ids.has_value() || ids->size(0) == tokens) &&
                      (has_row_per_pair ? x.size(1) == top_k : ids.has_value()),
                  "x must have a row for each token or for each pair of a token and an expert");
  // as they are cut out of a wider tensor, too
  const int64_t x_stride = x.stride(x.dim() - 2);
  check_rows(x, x.dim(), "x");
  STD_TORCH_CHECK(!has_row_per_pair || tokens <= 1 || x.stride(0) == top_k * x_stride, "the rows of x must be evenly spaced");
  STD_TORCH_CHECK(biases.empty() || biases.size() == packed.size(), "there must be a bias for each expert, or none");
  STD_TORCH_CHECK(first >= 0, "first must be the number of an expert");
  STD_TORCH_CHECK(!counts.has_value() || (counts->is_cpu() && counts->scalar_type() == ScalarType::Long &&
                                          counts->dim() == 1 && counts->size(0) >= first + num_experts &&
                                          counts->is_contiguous()),
                  "counts must be a contiguous int64 vector on the CPU, a number for each expert");
  Tensor out = empty({tokens, top_k, num_rows}, x);
  std::vector<MatmulArgs> experts;
  for (int64_t e = 0; e < num_experts; ++e) {
    MatmulArgs args{};
    args.weight = view_of(packed[e]);
    const PackedView &own = args.weight, &first = experts.empty() ? own : experts[0].weight;
    STD_TORCH_CHECK(own.rows == num_rows && own.columns == x.size(x.dim() - 1), "an expert has ", own.rows, " rows and ",
                    own.columns, " columns, not ", num_rows, " and ", x.size(x.dim() - 1));
    STD_TORCH_CHECK(own.format == first.format && own.group == first.group && own.has_zeros == first.has_zeros &&
                        own.is_weight_only == first.is_weight_only,
                    "the experts of a layer must be packed alike");
    args.dtype = args.out_dtype = dtype_of(x);
    args.arithmetic = arithmetic_of(own, args.dtype);
    args.x = x.const_data_ptr(), args.out = out.mutable_data_ptr();
    args.x_stride = x_stride, args.out_stride = num_rows;
    if (!biases.empty()) take_bias(biases[e], num_rows, args);
    experts.push_back(args);
  }
  if (tokens > 0 || is_recording()) {
    const int32_t* numbers = ids.has_value() ? static_cast<const int32_t*>(ids->const_data_ptr()) : nullptr;
    int64_t* numbers_of_rows = counts.has_value() ? static_cast<int64_t*>(counts->mutable_data_ptr()) : nullptr;
    perform(std::make_unique<GroupedStep>(std::move(experts), first, numbers, top_k, has_row_per_pair, numbers_of_rows,
                                          counts.has_value() ? counts->size(0) : 0),
            {tokens, 0});
  }
  return out;
}

void store_row(const float* from, int64_t n, DType dtype, void* to) {
  switch (dtype) {
    case DType::float32: std::memcpy(to, from, n * sizeof(float)); return;
    case DType::bfloat16:
      for (int64_t i = 0; i < n; ++i) static_cast<torch::headeronly::BFloat16*>(to)[i] = from[i];
      return;
    case DType::float16:
      for (int64_t i = 0; i < n; ++i) static_cast<torch::headeronly::Half*>(to)[i] = from[i];
      return;
  }
}

// `first` as in look_up.
class RowsStep final : public TokenStep {
 public:
  RowsStep(const PackedView& weight, const Tensor& ids, std::optional<int64_t> first, const Tensor& out)
      : weight_(weight), is_part_(first.has_value()), first_(first.value_or(0)), ids_(ids.const_data_ptr()), is_long_(ids.scalar_type() == ScalarType::Long),
        id_stride_(ids.stride(0)), out_(static_cast<char*>(out.mutable_data_ptr())), dtype_(dtype_of(out)),
        row_bytes_(weight.columns * static_cast<int64_t>(out.element_size())) {}

  int64_t work(const Extent& extent) const override { return 4 * extent.tokens * weight_.columns; }

  void check(const Extent& extent) const override {
    for (int64_t t = 0; t < extent.tokens && !is_part_; ++t) {
      STD_TORCH_CHECK(id(t) >= 0 && id(t) < weight_.rows, "id ", id(t), " is beyond the ", weight_.rows,
                      " rows of the packed weight");
    }
  }

  void run_tokens(int64_t begin, int64_t end) const override {
    float* row = static_cast<float*>(thread_scratch(weight_.columns * 4));
    for (int64_t t = begin; t < end; ++t) {
      char* to = out_ + t * row_bytes_;
      if (id(t) < 0 || id(t) >= weight_.rows) {
        std::memset(to, 0, row_bytes_);
        continue;
      }
      unpack_row(weight_, id(t), row);
      store_row(row, weight_.columns, dtype_, to);
    }
  }

 private:
  int64_t id(int64_t t) const {
    const int64_t whole = is_long_ ? static_cast<const int64_t*>(ids_)[t * id_stride_]
                                   : static_cast<const int32_t*>(ids_)[t * id_stride_];
    return whole - first_;
  }

  PackedView weight_;
  bool is_part_;
  int64_t first_;
  const void* ids_;
  bool is_long_;
  int64_t id_stride_;
  char* out_;
  DType dtype_;
  int64_t row_bytes_;
};

Tensor packed_rows_op(const Tensor& packed, const Tensor& ids, ScalarType dtype, int64_t num_columns,
                      std::optional<int64_t> first) {
  const PackedView view = view_of(packed);
  STD_TORCH_CHECK(ids.is_cpu() && ids.dim() == 1 &&
                      (ids.scalar_type() == ScalarType::Long || ids.scalar_type() == ScalarType::Int),
                  "ids must be a vector of int32 or int64 on the CPU");
  STD_TORCH_CHECK(num_columns == view.columns, "the weight has ", view.columns, " columns, not ", num_columns);
  Tensor out = empty({ids.size(0), view.columns}, dtype);
  perform(std::make_unique<RowsStep>(view, ids, first, out), {ids.size(0), 0});
  return out;
}

Tensor unpack_weight_op(const Tensor& packed) {
  const PackedView view = view_of(packed);
  Tensor out = empty({view.rows, view.columns}, ScalarType::Float);
  float* to = static_cast<float*>(out.mutable_data_ptr());
  run_crew(crew_size(), [&](Crew& crew) {
    crew.for_each(view.rows, 64, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) unpack_row(view, row, to + row * view.columns);
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("pack_weight", TORCH_BOX(&pack_weight_op));
  library.impl("pack_quantized", TORCH_BOX(&pack_quantized_op));
  library.impl("packed_linear", TORCH_BOX(&packed_linear_op));
  library.impl("sliced_linear", TORCH_BOX(&sliced_linear_op));
  library.impl("grouped_linear", TORCH_BOX(&grouped_linear_op));
  library.impl("packed_rows", TORCH_BOX(&packed_rows_op));
  library.impl("unpack_weight", TORCH_BOX(&unpack_weight_op));
}

}  // namespace quire
