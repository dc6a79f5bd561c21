// Runs a kernel of csrc/ on the CPU: every CUDA thread is a fiber, scheduled in random order between synchronisations.
//
// What tile.cuh wraps is done here by hand. Stores to other blocks arrive late and in any order; shared memory is as long
// as the launch says, starts as garbage and has forbidden pages behind it. Stands in for tile.cuh; one cluster is a grid.
// hopper_on_cpu.h adds what csrc/hopper.cuh has, delta_on_cpu.h what csrc/delta.cu uses.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
#define CLUSTERS 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (::cpu::now->index)
#define blockIdx (::cpu::now->block->index)

namespace cpu {
constexpr size_t PAGE = 4096, STACK = 64 << 10, MOST_SHARED = 1 << 20;
struct Index { u32 x; };
struct Gate {  // a barrier of a fixed number of threads
    u32 size, waiting = 0, generation = 0;
};
struct Barrier { i64 pending, count, bytes; u32 phase; };
struct Block {
    Index index;
    u32 place, shared;  // among the blocks that run; bytes of shared memory
    u8 *memory, *pages;
    Gate gate;
    std::map<u32, Barrier> barriers;
    u32 running;
};
struct Warp { Gate gate; u64 values[32]; };
struct Thread {
    Index index;
    Block *block;
    Warp *warp;
    struct Turn *turn;
    ucontext_t context;  // to start it; then `at` is where it stands
    jmp_buf at;
    u32 cluster_target = 0;
    bool started = false, done = false;
};
struct Turn {  // of a thread: whether it could run, which is asked far more often than it runs, so these lie together
    Thread *thread;
    bool (*ready)(const void *) = nullptr;  // null: it waits for nothing
    u64 waits_for[2];                       // what `ready` looks at
};
struct Chance {  // splitmix64: std::mt19937 took a sixth of a run
    u64 state = 0;
    u32 below(u32 n) { return (u64)(*this)() * n >> 32; }
    u32 operator()() {
        u64 z = state += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9, z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z >> 32;
    }
};
struct Send { u32 to, barrier; u8 data[16]; u32 bytes; };

inline Thread *now;
inline jmp_buf scheduler;
inline Index grid;
inline std::vector<std::unique_ptr<Thread>> threads;
inline std::vector<std::unique_ptr<Warp>> warps;
inline std::vector<Turn> turns;
inline u32 shared_start;                      // the address of the first byte of shared memory
inline std::function<bool(Thread *)> pauses;  // whether a thread that could run does not run this time
inline std::function<bool()> units;           // what works beside the threads; whether anything is left to do
inline std::function<void()> producer;        // ends, for a thread that waits for it
inline std::function<void()> consumer;        // may start, where a thread lets it
inline char failure[200];
inline std::vector<std::unique_ptr<Block>> blocks;
inline std::vector<Send> sends;
inline Gate cluster;
inline Chance chance;

// Ends the run, from a thread or beside them.
[[noreturn]] inline void fail(const char *what) {
    snprintf(failure, sizeof failure, "%s (block %u, thread %u)", what, blocks.empty() ? 0 : blocks[0]->index.x, now ? now->index.x : 0);
    _longjmp(scheduler, 2);
}
inline void yield() {
    if (!_setjmp(now->at)) _longjmp(scheduler, 1);
}
// What blocks here is not run, and so costs nothing, until `ready()`.
template <class Ready> inline void until(Ready ready) {
    if (ready()) return;
    Turn &turn = *now->turn;
    static_assert(sizeof ready <= sizeof turn.waits_for);
    memcpy(turn.waits_for, &ready, sizeof ready);
    turn.ready = [](const void *r) { return (*(const Ready *)r)(); };
    yield();
}
inline u32 arrive(Gate &g) {  // returns the generation after which all have arrived
    const u32 mine = g.generation + 1;
    if (++g.waiting == g.size) g.waiting = 0, g.generation = mine;
    return mine;
}
inline void await(Gate &g, u32 generation) {
    until([&g, generation] { return (int)(g.generation - generation) >= 0; });
}
inline u64 exchange(u64 value, u32 from, u64 *all = nullptr) {
    Warp &w = *now->warp;
    w.values[now->index.x % 32] = value;
    await(w.gate, arrive(w.gate));
    const u64 got = w.values[from];
    if (all) memcpy(all, w.values, sizeof w.values);
    await(w.gate, arrive(w.gate));
    return got;
}
inline u8 *at(u32 address, u32 bytes = 1) {
    if (address >> 20 >= blocks.size()) fail("an address of no block");
    const Block &b = *blocks[address >> 20];
    const u32 place = (address & (MOST_SHARED - 1)) - shared_start;
    if (place >= b.shared || b.shared - place < bytes) fail("an address outside shared memory");
    return b.memory + place;
}
inline Barrier &barrier(u32 address) {
    auto &all = blocks.at(address >> 20)->barriers;
    const auto found = all.find(address);
    if (found == all.end()) fail("a barrier is used before it is set up");
    return found->second;
}
inline void settle(Barrier &b) {
    if (b.pending < 0) fail("more arrivals at a barrier than its phase expects");
    if (b.pending == 0 && b.bytes == 0) b.pending = b.count, ++b.phase;
}
inline void deliver(size_t i) {
    const Send s = sends[i];
    sends[i] = sends.back(), sends.pop_back();
    if (!blocks.at(s.to >> 20)->running) fail("a store to a block that has ended");
    memcpy(at(s.to, s.bytes), s.data, s.bytes);
    Barrier &b = barrier(s.barrier);
    b.bytes -= s.bytes;
    settle(b);
}

inline void resume(Thread *t) {
    now = t;
    const int came = _setjmp(scheduler);
    if (came == 0) {
        if (t->started) _longjmp(t->at, 1);
        t->started = true;
        setcontext(&t->context);
    }
    now = nullptr;
}

inline void rounds(u32 seed) {
    const auto waits = [](const Turn *t) { return t->ready && !t->ready(t->waits_for); };
    std::vector<Turn *> order;
    for (Turn &t : turns) order.push_back(&t);
    while (!order.empty() && !*failure) {
        bool alive = !sends.empty();
        const bool idle = std::all_of(order.begin(), order.end(), waits);
        for (u32 n = order.size(); seed && !idle && n > 1; --n) std::swap(order[n - 1], order[chance.below(n)]);
        for (Turn *t : order) {
            if (idle) break;
            if (waits(t)) continue;
            alive = true;
            if (pauses && pauses(t->thread)) continue;
            t->ready = nullptr;
            resume(t->thread);
            if (*failure) return;
        }
        if (_setjmp(scheduler)) return;  // a failure beside the threads
        for (size_t n = sends.size(); n > 0; --n)
            if (chance() % 4 || n == 1) deliver(chance() % sends.size());
        if (units && units()) alive = true;
        order.erase(std::remove_if(order.begin(), order.end(), [](const Turn *t) { return t->thread->done; }), order.end());
        if (!alive) fail("the threads wait for each other");
    }
}

// `count` blocks from number `first` on, of `size` threads with `shared` bytes of shared memory, run `body`. Returns what went wrong.
inline const char *attempt(u32 first, u32 count, u32 size, u32 shared, u32 seed, std::function<void()> body) {
    static std::function<void()> job;
    job = body, chance.state = seed, sends.clear(), blocks.clear(), threads.clear(), warps.clear(), turns.assign((size_t)count * size, {}), *failure = 0;
    cluster = {count * size};
    const size_t stacks = (size_t)count * size * STACK, length = (shared + PAGE - 1) / PAGE * PAGE;
    u8 *stack = (u8 *)mmap(nullptr, stacks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (u32 b = 0; b < count; ++b) {
        u8 *pages = (u8 *)mmap(nullptr, length + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(pages + length, PAGE, PROT_NONE);
        memset(pages, 0xcd, length);
        blocks.emplace_back(new Block{{first + b}, b, shared, pages + length - (shared + 15) / 16 * 16, pages, {size}, {}, size});
        for (u32 t = 0; t < size; ++t) {
            if (t % 32 == 0) warps.emplace_back(new Warp{{32}, {}});
            threads.emplace_back(new Thread{{t}, blocks.back().get(), warps.back().get(), &turns[threads.size()]});
            threads.back()->turn->thread = threads.back().get();
            ucontext_t &c = threads.back()->context;
            getcontext(&c);
            c.uc_stack.ss_sp = stack + ((size_t)b * size + t) * STACK, c.uc_stack.ss_size = STACK, c.uc_link = nullptr;
            makecontext(&c, (void (*)())+[] { job(), now->done = true, --now->block->running, _longjmp(scheduler, 1); }, 0);
        }
    }
    // of a thread, its end and not the process's
    struct sigaction forbidden = {}, before;
    forbidden.sa_handler = [](int) { fail("memory that may not be touched"); }, forbidden.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &forbidden, &before);
    rounds(seed);
    sigaction(SIGSEGV, &before, nullptr);
    for (auto &b : blocks) munmap(b->pages, length + PAGE);
    munmap(stack, stacks);
    return *failure ? failure : nullptr;
}
inline void run(u32 count, u32 size, u32 shared, u32 seed, std::function<void()> body) {
    const char *wrong = attempt(0, count, size, shared, seed, body);
    if (wrong) fprintf(stderr, "cuda_on_cpu: %s\n", wrong), abort();
}
}  // namespace cpu

inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 __popc(u32 v) { return __builtin_popcount(v); }
inline u32 __clz(u32 v) { return v ? __builtin_clz(v) : 32; }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __float_as_uint(float f) { u32 v; memcpy(&v, &f, 4); return v; }
inline void __syncthreads() { cpu::await(cpu::now->block->gate, cpu::arrive(cpu::now->block->gate)); }
inline void __syncwarp() { cpu::exchange(0, 0); }
inline u32 __ballot_sync(u32, bool value) {
    u64 all[32];
    cpu::exchange(value, 0, all);
    u32 votes = 0;
    for (u32 i = 0; i < 32; ++i) votes |= (u32)all[i] << i;
    return votes;
}
template <class V> V __shfl_up_sync(u32, V value, u32 by) {
    const u32 lane = threadIdx.x % 32;
    return cpu::exchange(value, lane >= by ? lane - by : lane);
}
template <class V> V __shfl_xor_sync(u32, V value, u32 with) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = cpu::exchange(bits, threadIdx.x % 32 ^ with);
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline u32 shared_address(const void *p) {
    return cpu::now->block->place << 20 | (cpu::shared_start + (u32)((const u8 *)p - cpu::now->block->memory));
}
inline u32 remote(u32 address, u32 rank) { return (address & (cpu::MOST_SHARED - 1)) | rank << 20; }
inline void cluster_arrive() { cpu::now->cluster_target = cpu::arrive(cpu::cluster); }
inline void cluster_wait() { cpu::await(cpu::cluster, cpu::now->cluster_target); }
inline void barrier_init(u32 barrier, u32 count) { cpu::now->block->barriers[barrier] = {count, count, 0, 0}; }
inline void barrier_init_fence() {}
inline void barrier_expect(u32 barrier, u32 bytes) {
    cpu::Barrier &b = cpu::barrier(barrier);
    b.bytes += bytes, --b.pending;
    cpu::settle(b);
}
inline void barrier_wait(u32 barrier, u32 phase) {
    const cpu::Barrier &b = cpu::barrier(barrier);
    cpu::until([&b, phase] { return b.phase % 2 != phase; });
}
inline void send(u32 to, const void *data, u32 bytes, u32 barrier) {
    if (to % bytes) cpu::fail("a store that is not aligned");
    cpu::Send s = {to, barrier, {}, bytes};
    memcpy(s.data, data, bytes);
    cpu::sends.push_back(s);
}
inline void send16(u32 to, float4 v, u32 barrier) { send(to, &v, 16, barrier); }
inline void wait_for_producer() {
    if (cpu::producer) cpu::producer();
}
inline void let_consumer_start() {
    if (cpu::consumer) cpu::consumer();
}
inline void load_matrix4(u32 (&r)[4], u32 from) {
    u64 all[32];
    if (from % 16) cpu::fail("ldmatrix: an address that is not a multiple of 16");
    cpu::exchange(from, 0, all);
    const u32 lane = threadIdx.x % 32;
    for (u32 i = 0; i < 4; ++i) memcpy(&r[i], cpu::at((u32)all[8 * i + lane / 4], 16) + lane % 4 * 4, 4);
}
template <class E> void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u64 as[4][32], bs[2][32];
    for (u32 i = 0; i < 4; ++i) cpu::exchange(a[i], 0, as[i]);
    cpu::exchange(b0, 0, bs[0]), cpu::exchange(b1, 0, bs[1]);
    const u32 lane = threadIdx.x % 32;
    for (u32 i = 0; i < 4; ++i)
        for (u32 k = 0; k < 16; ++k) {
            const u32 pair = k % 8 / 2, shift = 16 * (k % 2), n = lane % 4 * 2 + i % 2;
            c[i] += E::widen((u32)as[i / 2 + 2 * (k / 8)][lane / 4 * 4 + pair] >> shift) * E::widen((u32)bs[k / 8][n * 4 + pair] >> shift);
        }
}
struct bf16 {
    static constexpr bool SCALED = false;
    static void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<bf16>(c, a, b0, b1); }
    static u16 round(float v) {
        const u32 b = __float_as_uint(v);
        return (b & 0x7fffffff) > 0x7f800000 ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
    }
    static float widen(u16 v) { return __uint_as_float((u32)v << 16); }
};
