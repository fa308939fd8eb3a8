/* What the driver of ik_llama.cpp calls: its structs change from version to version, so the compiler reads them here.

Weights are repacked at load (-rtr), attention is its flash attention; the rest is as its own tools have it. */

#include "llama.h"

static struct llama_model *model;
static struct llama_context *context;
static struct llama_batch batch;

/* Size of the vocabulary; 0 if it could not be loaded. */
int rival_open(const char *path, int threads, int length, int tokens, int step, int sequences, int repacked) {
    llama_backend_init();
    struct llama_model_params how = llama_model_default_params();
    how.use_mmap = !repacked;
    how.repack_tensors = repacked;
    how.n_gpu_layers = 0;
    model = llama_model_load_from_file(path, how);
    if (!model) return 0;
    struct llama_context_params wanted = llama_context_default_params();
    wanted.n_ctx = length;
    wanted.n_batch = tokens;
    wanted.n_ubatch = step;
    wanted.n_seq_max = sequences;
    wanted.n_threads = wanted.n_threads_batch = threads;
    wanted.flash_attn = 1;
    context = llama_init_from_model(model, wanted);
    if (!context) return 0;
    batch = llama_batch_init(tokens, 0, 1);
    return llama_n_vocab(model);
}

/* Columns of tokens; 0: computed. */
int rival_decode(int count, const int *tokens, const int *positions, const int *sequences, const signed char *chosen) {
    batch.n_tokens = count;
    for (int i = 0; i < count; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = positions[i];
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequences[i];
        batch.logits[i] = chosen[i];
    }
    return llama_decode(context, batch);
}

const float *rival_logits(int place) {
    return llama_get_logits_ith(context, place);
}

void rival_clear(void) {
    llama_kv_cache_clear(context);
}

void rival_remove(int sequence) {
    llama_kv_cache_seq_rm(context, sequence, -1, -1);
}

void rival_copy(int from, int to) {
    llama_kv_cache_seq_cp(context, from, to, -1, -1);
}
