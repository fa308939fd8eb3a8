// The operator that adds adapters to the output of a linear layer.

#include "adapters.h"
#include "operators.h"

namespace quire {
namespace {

// Columns of the output that one piece of work has.
constexpr int64_t EXPAND_COLUMNS = 512;
// Rows of a that one piece of work has.
constexpr int64_t SHRINK_ROWS = 8;

class AdapterStep final : public Step {
 public:
  explicit AdapterStep(const AdapterArgs& args) : args_(args), kernels_(*kernels()->adapters) {}

  int64_t work(const Extent& extent) const override {
    for (int64_t t = 0; t < extent.tokens; ++t) {
      if (args_.slots[t] >= 0) return extent.tokens * args_.most_rank * (args_.num_parts * args_.columns + args_.rows);
    }
    return 0;
  }

  void check(const Extent& extent) const override {
    for (int64_t t = 0; t < extent.tokens; ++t) {
      STD_TORCH_CHECK(args_.slots[t] < args_.num_slots, "slot ", args_.slots[t], ": there are ", args_.num_slots);
    }
    for (int64_t s = 0; s < args_.num_slots; ++s) {
      STD_TORCH_CHECK(args_.ranks[s] >= 0 && args_.ranks[s] <= args_.most_rank, "rank ", args_.ranks[s],
                      ": at most ", args_.most_rank);
    }
  }

  // Steps of base tokens alone cost a look at the slots: there is no barrier, because nobody writes.
  void run(const Extent& extent, Crew& crew) const override {
    static thread_local Order order;
    sort(extent.tokens, order);
    if (order.tokens.empty()) return;
    const int64_t low_row = args_.num_parts * args_.most_rank;
    float* low = static_cast<float*>(
        crew.shared_scratch(static_cast<int64_t>(order.tokens.size()) * low_row * static_cast<int64_t>(sizeof(float))));
    const int64_t num_blocks = static_cast<int64_t>(order.blocks.size());
    const int64_t shrinks = (low_row + SHRINK_ROWS - 1) / SHRINK_ROWS;
    crew.for_each(num_blocks * shrinks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const Block& block = order.blocks[piece / shrinks];
        const int64_t first = piece % shrinks * SHRINK_ROWS;
        kernels_.shrink(args_, order.tokens.data() + block.first, block.count, first,
                        min64(first + SHRINK_ROWS, low_row), low + block.first * low_row);
      }
    });
    const int64_t expands = (args_.rows + EXPAND_COLUMNS - 1) / EXPAND_COLUMNS;
    crew.for_each(num_blocks * expands, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const Block& block = order.blocks[piece / expands];
        const int64_t first = piece % expands * EXPAND_COLUMNS;
        kernels_.expand(args_, order.tokens.data() + block.first, block.count, first,
                        min64(first + EXPAND_COLUMNS, args_.rows), low + block.first * low_row);
      }
    });
  }

 private:
  struct Block {
    int64_t first, count;
  };
  // Tokens that have an adapter, by slot, and pieces of them that are computed together.
  struct Order {
    std::vector<int32_t> tokens;
    std::vector<int64_t> starts;
    std::vector<Block> blocks;
  };

  // Every thread for itself: cheaper than to wait until one has done it for all.
  void sort(int64_t num_tokens, Order& order) const {
    order.starts.assign(args_.num_slots + 1, 0);
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (args_.slots[t] >= 0) ++order.starts[args_.slots[t] + 1];
    }
    for (int64_t s = 0; s < args_.num_slots; ++s) order.starts[s + 1] += order.starts[s];
    order.tokens.resize(order.starts[args_.num_slots]);
    order.blocks.clear();
    if (order.tokens.empty()) return;
    for (int64_t s = 0; s < args_.num_slots; ++s) {
      for (int64_t first = order.starts[s]; first < order.starts[s + 1]; first += ADAPTER_TOKENS) {
        order.blocks.push_back({first, min64(ADAPTER_TOKENS, order.starts[s + 1] - first)});
      }
    }
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (args_.slots[t] >= 0) order.tokens[order.starts[args_.slots[t]]++] = static_cast<int32_t>(t);
    }
  }

  AdapterArgs args_;
  const AdapterKernels& kernels_;
};

void check_vector(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.dim() == 1 && t.scalar_type() == ScalarType::Int && t.is_contiguous(), name,
                  " must be a contiguous vector of int32 on the CPU");
}

void add_adapters_op(const Tensor& y, const Tensor& x, const Tensor& slots, const Tensor& ranks, const Tensor& a,
                     const Tensor& b, const std::vector<int64_t>& parts) {
  check_rows(x, 2, "x"), check_rows(y, 2, "y");
  check_vector(slots, "slots"), check_vector(ranks, "ranks");
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  STD_TORCH_CHECK(num_parts >= 1 && num_parts <= MOST_PARTS, "a layer has 1 to ", MOST_PARTS, " parts");
  STD_TORCH_CHECK(a.dim() == 4 && a.is_contiguous() && a.size(1) == num_parts && a.size(3) == x.size(1),
                  "a must be contiguous, [slots, parts, rank, inputs]");
  STD_TORCH_CHECK(b.dim() == 3 && b.is_contiguous() && b.size(0) == a.size(0) && b.size(1) == a.size(2) &&
                      b.size(2) == y.size(1),
                  "b must be contiguous, [slots, rank, outputs]");
  STD_TORCH_CHECK(slots.size(0) == x.size(0) && y.size(0) == x.size(0) && ranks.size(0) == a.size(0),
                  "slots must have an entry for each row of x and of y, ranks one for each slot");
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(y.scalar_type() == dtype && a.scalar_type() == dtype && b.scalar_type() == dtype,
                  "x, y, a and b must have one dtype");
  AdapterArgs args{};
  args.dtype = dtype_of(x);
  args.x = x.const_data_ptr(), args.y = y.mutable_data_ptr();
  args.a = a.const_data_ptr(), args.b = b.const_data_ptr();
  args.slots = static_cast<const int32_t*>(slots.const_data_ptr());
  args.ranks = static_cast<const int32_t*>(ranks.const_data_ptr());
  args.x_stride = x.stride(0), args.y_stride = y.stride(0);
  args.columns = x.size(1), args.rows = y.size(1), args.most_rank = a.size(2), args.num_slots = a.size(0);
  args.num_parts = static_cast<int>(num_parts);
  int64_t end = 0;
  for (int64_t p = 0; p < num_parts; ++p) end += parts[p], args.part_ends[p] = end;
  STD_TORCH_CHECK(end == args.rows, "the parts have ", end, " outputs together, y has ", args.rows);
  if (x.size(0) > 0 || is_recording()) perform(std::make_unique<AdapterStep>(args), {x.size(0), 0});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("add_adapters", TORCH_BOX(&add_adapters_op));
}

}  // namespace quire
