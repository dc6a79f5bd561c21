// csrc/delta.cu on the CPU: what it has of tile.cuh, and of CUDA, beyond cuda_on_cpu.h, as fibers see it. One cluster runs at a time.
//
// Copies land when they are waited for, and until then what they go to holds garbage. What the kernel ahead writes holds something
// else until a thread has waited for that kernel.
#include "cuda_on_cpu.h"
#define __align__(n) alignas(n)
#define __cluster_dims__(...)

namespace cpu {
struct Copy { u32 to; const void *from; int bytes; u32 group; };
struct Copies { std::vector<Copy> under_way; u32 group = 0; };
struct Hidden { u8 *at; size_t bytes; u32 integer; std::vector<u8> kept; }; // integer: bytes of each, 0 for other numbers
inline std::map<const Thread *, Copies> copies;
inline std::map<const Block *, u32> votes;
inline std::vector<Hidden> hidden;
inline u32 block_y, block_z;

inline u32 sum_over_block(u32 value) {
    u32 &sum = votes[now->block];
    sum += value;
    await(now->block->gate, arrive(now->block->gate));
    const u32 got = sum;
    await(now->block->gate, arrive(now->block->gate));
    sum = 0;
    await(now->block->gate, arrive(now->block->gate));
    return got;
}
inline void hide() {
    for (Hidden &h : hidden) {
        h.kept.assign(h.at, h.at + h.bytes);
        memset(h.at, h.integer ? 0 : 0xff, h.bytes);
        for (size_t i = 0; h.integer && i < h.bytes; i += h.integer) h.at[i] = chance() % 4;
    }
}
inline void show() {
    for (Hidden &h : hidden)
        if (!h.kept.empty()) memcpy(h.at, h.kept.data(), h.bytes), h.kept.clear();
}
// Clusters of `count` blocks, `tiles` by `deep` of them.
inline const char *run_clusters(u32 count, u32 tiles, u32 deep, u32 size, u32 shared, u32 seed, std::function<void()> body) {
    producer = [] { show(); };
    const char *wrong = nullptr;
    for (u32 i = 0; i < tiles * deep && !wrong; ++i) {
        block_y = i % tiles, block_z = i / tiles;
        copies.clear(), votes.clear(), hide();
        wrong = attempt(0, count, size, shared, seed + i, body);
        show();
        for (auto &[_, c] : copies)
            for (const Copy &copy : c.under_way)
                if (!wrong && copy.bytes) wrong = "a thread has ended with copies on their way";
    }
    producer = nullptr, hidden.clear();
    return wrong;
}
} // namespace cpu
extern "C" void hide(void *at, size_t bytes, u32 integer) { cpu::hidden.push_back({(u8 *)at, bytes, integer, {}}); }

inline u32 __syncthreads_count(bool v) { return cpu::sum_over_block(v); }
inline bool __syncthreads_and(bool v) { return cpu::sum_over_block(!v) == 0; }

inline void copy16(u32 to, const void *from, int valid) {
    if (to % 16 || (valid && (u64)from % 16)) cpu::fail("cp.async: an address that is not a multiple of 16");
    memset(cpu::at(to, 16), 0x7f, 16);
    cpu::Copies &c = cpu::copies[cpu::now];
    c.under_way.push_back({to, from, valid, c.group});
}
inline void copies_commit() { ++cpu::copies[cpu::now].group; }
template <int N> void copies_wait() {
    cpu::Copies &c = cpu::copies[cpu::now];
    size_t kept = 0;
    for (const cpu::Copy &copy : c.under_way) {
        if (copy.group + N >= c.group) {
            c.under_way[kept++] = copy;
            continue;
        }
        u8 data[16] = {};
        memcpy(data, copy.from, copy.bytes);
        memcpy(cpu::at(copy.to, 16), data, 16);
    }
    c.under_way.resize(kept);
}
struct fp16 {
    static constexpr bool SCALED = true;
    static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<fp16>(c, a, b0, b1); }
    static u16 round(float v) {
        const _Float16 half = v;
        u16 bits;
        memcpy(&bits, &half, 2);
        return bits;
    }
    static float widen(u16 v) {
        _Float16 half;
        memcpy(&half, &v, 2);
        return half;
    }
};
