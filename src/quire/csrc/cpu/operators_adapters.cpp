// The operator that adds adapters to the output of a linear layer.

#include "adapters.h"
#include "operators.h"

namespace quire {
namespace {

// Panels of b that one piece of work has.
constexpr int64_t EXPANDED_AT_ONCE = 32;

class AdapterStep final : public Step {
 public:
  explicit AdapterStep(const AdapterArgs& args) : args_(args), kernels_(kernels_for(args.dtype)) {}

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
    place(order, crew);
    const int64_t num_blocks = static_cast<int64_t>(order.blocks.size());
    crew.for_each(num_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kernels_.prepare(args_, order.blocks[i]);
    });
    const int64_t most_panels = args_.a_panels(args_.most_rank);
    crew.for_each(num_blocks * most_panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const AdapterBlock& block = order.blocks[piece / most_panels];
        const int64_t panel = piece % most_panels;
        if (panel < args_.a_panels(block.rank)) kernels_.shrink(args_, block, panel, panel + 1);
      }
    });
    const int64_t panels = args_.b_panels(), expands = (panels + EXPANDED_AT_ONCE - 1) / EXPANDED_AT_ONCE;
    crew.for_each(num_blocks * expands, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece % expands * EXPANDED_AT_ONCE;
        kernels_.expand(args_, order.blocks[piece / expands], first, min64(first + EXPANDED_AT_ONCE, panels));
      }
    });
  }

 private:
  // Tokens that have an adapter, by slot, and pieces of them that are computed together.
  struct Order {
    std::vector<int32_t> tokens;
    std::vector<int64_t> starts;
    std::vector<AdapterBlock> blocks;
  };

  static const AdapterKernels& kernels_for(DType dtype) {
    const AdapterKernels* best = kernels()->adapters;
    return dtype == DType::bfloat16 || best->other_types == nullptr ? *best : *best->other_types;
  }

  // The slot whose adapter a token has, or -1: of rank 0 is one that has nothing for this layer.
  int32_t slot_of(int64_t token) const {
    const int32_t slot = args_.slots[token];
    return slot >= 0 && args_.ranks[slot] > 0 ? slot : -1;
  }

  // Every thread for itself: cheaper than to wait until one has done it for all.
  void sort(int64_t num_tokens, Order& order) const {
    order.starts.assign(args_.num_slots + 1, 0);
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (const int32_t slot = slot_of(t); slot >= 0) ++order.starts[slot + 1];
    }
    for (int64_t s = 0; s < args_.num_slots; ++s) order.starts[s + 1] += order.starts[s];
    order.tokens.resize(order.starts[args_.num_slots]);
    order.blocks.clear();
    for (int32_t s = 0; s < args_.num_slots; ++s) {
      for (int64_t first = order.starts[s]; first < order.starts[s + 1]; first += kernels_.tokens) {
        const int64_t count = min64(kernels_.tokens, order.starts[s + 1] - first);
        order.blocks.push_back({order.tokens.data() + first, count, s, args_.ranks[s], nullptr, nullptr});
      }
    }
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (const int32_t slot = slot_of(t); slot >= 0) order.tokens[order.starts[slot]++] = static_cast<int32_t>(t);
    }
  }

  // Memory for what the blocks pass on between the loops.
  void place(Order& order, Crew& crew) const {
    const int64_t prepared_bytes = kernels_.prepared_bytes(args_), low_bytes = kernels_.low_bytes(args_);
    const int64_t num_tokens = static_cast<int64_t>(order.tokens.size());
    char* prepared = static_cast<char*>(crew.shared_scratch(num_tokens * (prepared_bytes + low_bytes)));
    char* low = prepared + num_tokens * prepared_bytes;
    for (AdapterBlock& block : order.blocks) {
      block.prepared = prepared, block.low = low;
      prepared += block.count * prepared_bytes, low += block.count * low_bytes;
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
                     const Tensor& b, const std::vector<int64_t>& parts, int64_t most_rank) {
  check_rows(x, 2, "x"), check_rows(y, 2, "y");
  check_vector(slots, "slots"), check_vector(ranks, "ranks");
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  STD_TORCH_CHECK(num_parts >= 1 && num_parts <= MOST_PARTS, "a layer has 1 to ", MOST_PARTS, " parts");
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(0) == b.size(0), "a and b must be [slots, elements]");
  check_rows(a, 2, "a"), check_rows(b, 2, "b");
  STD_TORCH_CHECK(slots.size(0) == x.size(0) && y.size(0) == x.size(0) && ranks.size(0) == a.size(0),
                  "slots must have an entry for each row of x and of y, ranks one for each slot");
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(a.scalar_type() == dtype && b.scalar_type() == dtype, "x, a and b must have one dtype");
  STD_TORCH_CHECK(y.scalar_type() == dtype || y.scalar_type() == ScalarType::Float,
                  "y must have the dtype of x, or be float32");
  AdapterArgs args{};
  args.dtype = dtype_of(x), args.y_dtype = dtype_of(y);
  args.x = x.const_data_ptr(), args.y = y.mutable_data_ptr();
  args.a = a.const_data_ptr(), args.b = b.const_data_ptr();
  args.slots = static_cast<const int32_t*>(slots.const_data_ptr());
  args.ranks = static_cast<const int32_t*>(ranks.const_data_ptr());
  args.x_stride = x.stride(0), args.y_stride = y.stride(0);
  args.a_stride = a.stride(0), args.b_stride = b.stride(0);
  args.columns = x.size(1), args.rows = y.size(1), args.most_rank = most_rank, args.num_slots = a.size(0);
  args.num_parts = static_cast<int>(num_parts);
  int64_t end = 0;
  for (int64_t p = 0; p < num_parts; ++p) end += parts[p], args.part_ends[p] = end;
  STD_TORCH_CHECK(end == args.rows, "the parts have ", end, " outputs together, y has ", args.rows);
  STD_TORCH_CHECK(most_rank >= 1 && a.size(1) == args.a_elements() && b.size(1) == args.b_elements(), "slots of rank ",
                  most_rank, " have ", args.a_elements(), " elements in a and ", args.b_elements(), " in b");
  if (x.size(0) > 0 || is_recording()) perform(std::make_unique<AdapterStep>(args), {x.size(0), 0});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quire, CPU, library) {
  if (kernels() == nullptr) return;  // a processor without AVX2 keeps the reference
  library.impl("add_adapters", TORCH_BOX(&add_adapters_op));
}

}  // namespace quire
