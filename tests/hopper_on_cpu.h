// csrc/hopper.cuh on the CPU: shared-memory barriers, TMA, cp.async, ldmatrix, mma, wgmma, as fibers see them.
//
// What the hardware does beside the threads happens here as late as it may, in random order: boxes arrive in pieces, copies
// land at the latest when they are waited for, products read shared memory at the latest when they are waited for. Memory on
// its way holds garbage. A seed also decides which warps are slow. Blocks run one after the other, by odd
// seeds the first one first.
//
// Descriptors of wgmma's operands are made by hopper.cuh's own lines, which are no assembly.
// A tensor map is 16 words: address, 4 sizes, 3 strides in bytes, 4 lengths of the box, MAP, bytes of an element, zeros
// (tests/test_linear_csrc.py).
#include "cuda_on_cpu.h"
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __noinline__ __attribute__((noinline))
#define __align__(n) // addresses are those of the emulated shared memory
#define gridDim (::cpu::grid)

inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace cpu {
constexpr u64 MAP = 0x70616d20726f736e;
constexpr u32 N = 256, M = 16; // of a warp's part of a product, the widest one
constexpr u32 NONE = ~0u;

struct Copy { u32 to; const u8 *from; u32 bytes, group, number; };
struct Arrival { u32 barrier, behind; }; // when the copies before number `behind` have landed
struct Piece { // of a box: rows of 128 bytes
    u32 to, barrier, rows;
    const u64 *map;
    int start[4];
    u32 first;
};
struct Product { u64 a, b; bool transposed; u32 columns, joined; };
struct Lane { // of a thread
    std::vector<Copy> copies;
    std::vector<Arrival> arrivals;
    u32 copied = 0, copy_group = 0, products = 0, product_groups = 0;
    std::vector<u32> unfenced; // what it wrote for the matrix units, in 16 bytes
    std::map<const Barrier *, i64> phases; // the phase of a barrier that it waited for last
    float *d = nullptr; // in the matrix units' hands
    u32 elements = 0;   // of it
    bool fenced = false, waited = false;
};
struct Quarter { // a warp's part of its warpgroup's products
    std::vector<Product> products;
    std::vector<u32> groups; // products up to the end of each
    u32 done = 0;
    float d[M][N];
};
struct Named { Gate gate; u32 any[2]; };

inline std::vector<Lane> lanes;
inline std::vector<Quarter> quarters;
inline std::vector<Piece> pieces;
inline std::vector<u8> unfenced; // of shared memory, in 16 bytes
inline std::map<u32, Named> named;
inline u32 seed_of_run, registers, speeds[32], landing, multiplying, arriving; // chances: one in so many rounds
inline u8 *hidden; // what the kernel ahead writes, and how much of it
inline size_t hidden_bytes;
inline std::vector<u8> hidden_copy;
inline bool is_hidden;
extern "C" {
u64 copies_made; // by cp.async
u32 behind_any_kernel; // not behind our shrink, which lets others start when all before it have ended
}

inline Lane &lane() { return lanes[now->index.x]; }
inline bool one_in(u32 n) { return n <= 1 || chance() % n == 0; }
// Threads stop here now and then.
inline void stumble() {
    if (one_in(16)) yield();
}
inline void garbage(u8 *to, u32 bytes) {
    static const u16 values[] = {0x7fff, 0x4b4b, 0xff80, 0xc7c7};
    const u16 v = values[chance() % 4];
    for (u32 i = 0; i < bytes; i += 2) memcpy(to + i, &v, 2);
}

// --- copies of threads ---

inline void copy(u32 to, const void *from, u32 bytes) {
    if (to % 16 || (u64)from % 16) fail("cp.async: an address that is not a multiple of 16");
    if (bytes > 16) fail("cp.async: more than 16 bytes");
    const u8 *f = (const u8 *)from;
    if (bytes && hidden && f >= hidden && f < hidden + hidden_bytes && !lane().waited) fail("h is read before the kernel that makes it has ended");
    garbage(at(to, 16), 16);
    ++copies_made;
    lane().copies.push_back({to, f, bytes, lane().copy_group, lane().copied++});
}
inline void land(const Copy &c) {
    u8 data[16] = {};
    memcpy(data, c.from, c.bytes);
    memcpy(at(c.to, 16), data, 16);
}
inline void land_some(Lane &l) {
    for (size_t n = chance() % (l.copies.size() + 1); n > 0; --n) {
        const size_t i = chance() % l.copies.size();
        land(l.copies[i]);
        l.copies[i] = l.copies.back(), l.copies.pop_back();
    }
}
inline void arrive_behind(Lane &l) {
    size_t kept = 0;
    for (const Arrival &a : l.arrivals) {
        bool landed = true;
        for (const Copy &c : l.copies) landed &= c.number >= a.behind;
        if (landed) {
            Barrier &b = barrier(a.barrier);
            --b.pending;
            settle(b);
        } else l.arrivals[kept++] = a;
    }
    l.arrivals.resize(kept);
}
inline void copies_wait(u32 newest) {
    Lane &l = lane();
    size_t kept = 0;
    for (const Copy &c : l.copies) {
        if (c.group + newest < l.copy_group) land(c);
        else l.copies[kept++] = c;
    }
    l.copies.resize(kept);
}

// --- boxes ---

inline void fetch(u32 to, const void *words, const int (&start)[4], u32 barrier_at) {
    const u64 *map = (const u64 *)words;
    if (map[12] != MAP) fail("TMA: not a tensor map");
    if (to % 1024) fail("TMA: a swizzled box that does not start at a multiple of 1024 bytes");
    if (map[8] * map[13] != 128) fail("TMA: a box whose rows are not 128 bytes");
    if (hidden && (u8 *)map[0] == hidden && !lane().waited) fail("x is read before the kernel that makes it has ended");
    const u32 rows = map[9] * map[10] * map[11], each = 8;
    garbage(at(to, rows * 128), rows * 128);
    barrier(barrier_at);
    for (u32 row = 0; row < rows; row += each) {
        Piece p = {to, barrier_at, min(each, rows - row), map, {start[0], start[1], start[2], start[3]}, row};
        pieces.push_back(p);
    }
}
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }
inline void arrive_piece(size_t index) {
    const Piece p = pieces[index];
    pieces[index] = pieces.back(), pieces.pop_back();
    const u64 *sizes = p.map + 1, *strides = p.map + 5, *box = p.map + 8;
    for (u32 row = p.first; row < p.first + p.rows; ++row) {
        const i64 c[4] = {p.start[0], p.start[1] + row % box[1], p.start[2] + row / box[1] % box[2], p.start[3] + row / (box[1] * box[2])};
        bool inside = true;
        const u8 *from = (const u8 *)p.map[0];
        for (u32 i = 1; i < 4; ++i) inside &= c[i] >= 0 && (u64)c[i] < sizes[i], from += c[i] * strides[i - 1];
        const u32 each = p.map[13];
        for (u32 i = 0; i < 128 / each; ++i) {
            u16 v = 0;
            if (inside && c[0] + i >= 0 && (u64)(c[0] + i) < sizes[0]) memcpy(&v, from + each * (c[0] + i), each);
            memcpy(at(swizzled(p.to + row * 128 + i * each), each), &v, each);
        }
    }
    Barrier &b = barrier(p.barrier);
    b.bytes -= p.rows * 128;
    settle(b);
}

// --- barriers ---

// A thread waits for a barrier's phases one after the other, each as often as it likes: a parity names the phase it waited for last, or
// the next. A barrier that is further, or not as far, would be read wrongly.
inline void wait(Barrier &b, u32 parity) {
    auto found = lane().phases.find(&b);
    if (found == lane().phases.end()) found = lane().phases.emplace(&b, parity ? -1 : 0).first;
    else if ((found->second & 1) != parity) ++found->second;
    const i64 phase = found->second;
    if (b.phase != phase && b.phase != phase + 1) fail("a barrier's phase is not the one waited for, nor the one behind it");
    stumble();
    until([&b, phase] { return b.phase != phase; });
    if (b.phase != phase + 1) fail("a barrier went through a phase while a thread waited for the one before");
}

// --- products ---

// 8 elements of an operand that lie side by side: of a row of K, or (mn_major) of M or N.
inline void read(u64 descriptor, u32 row, u32 k, bool mn_major, float (&to)[8]) {
    const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    const u32 place = mn_major ? row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128 : row / 8 * stride + row % 8 * 128 + k * 2;
    const u32 from = swizzled(start + place);
    u16 v[8];
    memcpy(v, at(from, 16), 16);
    if (unfenced[(from - shared_start) / 16]) fail("wgmma: reads what a thread wrote without a fence");
    for (u32 i = 0; i < 8; ++i) to[i] = __uint_as_float((u32)v[i] << 16);
}
inline void check(u64 descriptor) {
    if (descriptor >> 62 != 1) fail("wgmma: an operand not swizzled by 128 bytes");
    if (descriptor & ~(0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 3ull << 62)) fail("wgmma: a descriptor with bits that are not its fields'");
}
inline void execute(Quarter &q, u32 quarter) {
    const Product p = q.products[q.done++];
    static float a[M][16], b[16][N];
    float side[8];
    for (u32 m = 0; m < M; ++m)
        for (u32 k = 0; k < 16; k += 8) {
            read(p.a, quarter * M + m, k, false, side);
            for (u32 i = 0; i < 8; ++i) a[m][k + i] = side[i];
        }
    for (u32 n = 0; n < p.columns; n += p.transposed ? 8 : 1)
        for (u32 k = 0; k < 16; k += p.transposed ? 1 : 8) {
            read(p.b, n, k, p.transposed, side);
            for (u32 i = 0; i < 8; ++i) (p.transposed ? b[k][n + i] : b[k + i][n]) = side[i];
        }
    for (u32 m = 0; m < M; ++m)
        for (u32 k = 0; k < 16; ++k) {
            const float v = a[m][k];
            for (u32 n = 0; n < p.columns; ++n) q.d[m][n] += v * b[k][n];
        }
}
inline float &element(Quarter &q, u32 thread, u32 i) { return q.d[thread % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + thread % 4 * 2 + i % 2]; }

inline void issue(float *d, u32 elements, u64 a, u64 b, bool transposed) {
    const u32 thread = now->index.x;
    Lane &l = lane();
    Quarter &q = quarters[thread / 32];
    check(a), check(b);
    if (l.d == nullptr) { // until they are waited for, no one may look at d
        if (!l.fenced) fail("wgmma: no fence between the accumulator's last change and a product");
        l.d = d, l.elements = elements;
        for (u32 i = 0; i < elements; ++i) element(q, thread, i) = d[i], d[i] = __uint_as_float(0x7fc00000);
    }
    if (l.d != d || l.elements != elements) fail("wgmma: two accumulators at once");
    if (l.products == q.products.size()) q.products.push_back({a, b, transposed, 2 * elements, 0});
    Product &p = q.products[l.products++];
    if (p.a != a || p.b != b || p.transposed != transposed || p.columns != 2 * elements) fail("wgmma: threads of a warp name different operands");
    ++p.joined;
}
inline void commit() {
    Lane &l = lane();
    Quarter &q = quarters[now->index.x / 32];
    if (l.product_groups == q.groups.size()) q.groups.push_back(l.products);
    if (q.groups[l.product_groups++] != l.products) fail("wgmma: threads of a warp commit different products");
}
inline void products_wait(u32 newest) {
    Lane &l = lane();
    Quarter &q = quarters[now->index.x / 32];
    const u32 due = l.product_groups > newest ? q.groups[l.product_groups - newest - 1] : 0;
    until([&q, due] { return q.done >= due; });
    if (newest == 0 && l.d != nullptr) {
        for (u32 i = 0; i < l.elements; ++i) l.d[i] = element(q, now->index.x, i);
        l.d = nullptr, l.fenced = false;
    }
}

// --- the run ---

inline bool work() {
    bool left = !pieces.empty();
    for (Lane &l : lanes) {
        if (!l.arrivals.empty()) arrive_behind(l), left = true;
        if (l.copies.empty()) continue;
        if (one_in(landing)) land_some(l);
        left = true;
    }
    for (u32 w = 0; w < quarters.size(); ++w) {
        Quarter &q = quarters[w];
        while (q.done < q.products.size() && q.products[q.done].joined == 32) {
            left = true;
            if (!one_in(multiplying)) break;
            execute(q, w % 4);
        }
    }
    for (size_t n = pieces.size(); n > 0; --n)
        if (one_in(arriving)) arrive_piece(chance() % pieces.size());
    return left;
}
inline const char *check_rest() {
    for (Lane &l : lanes) {
        if (!l.copies.empty()) return "a thread has ended with copies on their way";
        if (!l.arrivals.empty()) return "a thread has ended with a barrier to arrive at";
        if (l.d != nullptr) return "a thread has ended with products on their way";
    }
    for (u32 w = 0; w < quarters.size(); ++w) {
        const Quarter &first = quarters[w / 4 * 4], &q = quarters[w];
        if (q.products.size() != first.products.size()) return "warps of a group have multiplied differently often";
        for (size_t i = 0; i < q.products.size(); ++i)
            if (q.products[i].a != first.products[i].a || q.products[i].b != first.products[i].b) return "warps of a group name different operands";
    }
    if (!pieces.empty()) return "the block has ended with boxes on their way";
    for (auto &[_, b] : blocks[0]->barriers)
        if (b.bytes || b.pending != b.count) return "a barrier is left in the middle of a phase";
    return nullptr;
}
inline void hide() {
    if (hidden) hidden_copy.assign(hidden, hidden + hidden_bytes), memset(hidden, 0xff, hidden_bytes), is_hidden = true;
}
inline void show() {
    if (is_hidden) memcpy(hidden, hidden_copy.data(), hidden_bytes), is_hidden = false;
}

inline const char *run_grid(u32 count, u32 size, u32 shared, u32 seed, void *from_ahead, size_t from_ahead_bytes, std::function<void()> body) {
    static const u32 chances[] = {1, 2, 4, 16};
    Chance draw = {seed};
    grid = {count}, seed_of_run = seed;
    for (u32 i = 0; i < count; ++i) {
        const u32 b = seed % 2 ? i : count - 1 - i;
        lanes.assign(size, {}), quarters.assign(size / 32, {}), pieces.clear(), named.clear(), unfenced.assign(shared / 16 + 1, 0);
        for (u32 &speed : speeds) speed = chances[draw() % 4];
        landing = chances[draw() % 4], multiplying = chances[draw() % 4], arriving = chances[draw() % 4];
        const bool ragged = draw() % 2;
        shared_start = draw() % 256 * 16 + 16, registers = 0;
        hidden = (u8 *)from_ahead, hidden_bytes = from_ahead_bytes;
        static u32 skipped; // warps that do not run in this round
        pauses = [ragged](Thread *t) { return skipped >> t->index.x / 32 & 1 || (ragged && one_in(8)); };
        units = [] {
            const bool left = work();
            skipped = 0;
            for (u32 w = 0; w < lanes.size() / 32; ++w) skipped |= (u32)!one_in(speeds[w]) << w;
            return left;
        };
        producer = [] { lane().waited = true, show(); };
        consumer = [] {
            if (behind_any_kernel && !lane().waited) fail("another kernel may start before the one ahead has ended");
        };
        hide();
        const char *wrong = attempt(b, 1, size, shared, seed * 1000 + b + 1, body);
        show();
        wrong = wrong ? wrong : check_rest();
        pauses = nullptr, units = nullptr, producer = nullptr, consumer = nullptr, shared_start = 0;
        if (wrong) return wrong;
    }
    return nullptr;
}
} // namespace cpu

// --- what csrc/tile.cuh and csrc/hopper.cuh have ---

inline u32 __ffs(u32 v) { return __builtin_ffs(v); }
// Of a counter in global memory blocks take numbers one by one: as they run one after the other here, each number is some block's from
// the start, at random.
inline u32 atomicAdd(u32 *at, u32 more) {
    const cpu::Block &b = *cpu::now->block;
    if ((u8 *)at >= b.memory && (u8 *)at < b.memory + b.shared) return (*at += more) - more;
    if (more != 1) cpu::fail("a counter in global memory that is not counted by ones");
    const u32 mine = blockIdx.x;
    if (*at >> 24 != mine + 1) *at = (mine + 1) << 24; // this block's first
    for (u32 i = *at & 0xffffff;; ++i) {
        const u32 whose = (u32)(((u64)(i + cpu::seed_of_run) * 2654435761u >> 7) % gridDim.x);
        if (whose == mine) return *at = ((mine + 1) << 24) + i + 1, i;
    }
}
template <class V> V __shfl_sync(u32, V value, u32 from) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = cpu::exchange(bits, from);
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline bool __any_sync(u32 mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline u32 atomicOr(u32 *at, u32 bits) {
    const u32 old = *at;
    *at |= bits;
    return old;
}

inline float product(float a, float b) { return a * b; }
inline u32 two(float first, float second) { return bf16::round(first) | (u32)bf16::round(second) << 16; }
inline u32 exchange(u32 v, u32 with) { return __shfl_xor_sync(~0u, v, with); }

inline void copy16(u32 to, const void *from) { cpu::copy(to, from, 16); }
inline void copy16(u32 to, const void *from, int valid) { cpu::copy(to, from, valid); }
inline void call_into_l2(const void *) {}
inline void arrive_with_copies(const u64 &barrier) { cpu::lane().arrivals.push_back({shared_address(&barrier), cpu::lane().copied}); }
inline void copies_commit() { ++cpu::lane().copy_group; }
template <int N> void copies_wait() { cpu::copies_wait(N), cpu::stumble(); }

inline void arrive(const u64 &barrier) {
    cpu::stumble();
    cpu::Barrier &b = cpu::barrier(shared_address(&barrier));
    --b.pending;
    cpu::settle(b);
}
inline void wait(const u64 &barrier, u32 phase) { cpu::wait(cpu::barrier(shared_address(&barrier)), phase); }
inline void fetch_box(u32 to, const void *map, int c0, int c1, int c2, int c3, const u64 &barrier) {
    cpu::fetch(to, map, {c0, c1, c2, c3}, shared_address(&barrier)), cpu::stumble();
}

template <bool TRANSPOSED, u32 ELEMENTS> void multiply(float (&d)[ELEMENTS], u64 a, u64 b) { cpu::issue(d, ELEMENTS, a, b, TRANSPOSED); }
template <bool TRANSPOSED, u32 ELEMENTS> void multiply_first(float (&d)[ELEMENTS], u64 a, u64 b) {
    if (cpu::lane().d != nullptr) cpu::fail("wgmma: a new sum while the one before is on its way");
    for (float &v : d) v = 0.0f;
    multiply<TRANSPOSED>(d, a, b);
}
inline void multiplies_begin() { cpu::lane().fenced = true; }
inline void multiplies_commit() { cpu::commit(), cpu::stumble(); }
template <int N> void multiplies_wait() { cpu::products_wait(N); }
template <u32 ELEMENTS> void multiplied(float (&d)[ELEMENTS]) { multiplies_wait<0>(); }

template <int N> void more_registers() {
    if ((cpu::registers += N) > 65536) cpu::fail("more registers than a multiprocessor has");
}
template <int N> void fewer_registers() { more_registers<N>(); }

template <int THREADS> bool any_of(u32 number, bool mine) {
    cpu::Named &n = cpu::named[number];
    n.gate.size = THREADS;
    const u32 side = n.gate.generation & 1;
    if (n.gate.waiting == 0) n.any[side] = 0;
    n.any[side] |= mine;
    cpu::await(n.gate, cpu::arrive(n.gate));
    return n.any[side];
}

inline void written_for_matrix_units() {
    for (u32 chunk : cpu::lane().unfenced) cpu::unfenced[chunk] = 0;
    cpu::lane().unfenced.clear();
}
inline void store16(u32 to, uint4 v) {
    if (to % 16) cpu::fail("a store that is not aligned");
    const u32 chunk = (to & (cpu::MOST_SHARED - 1)) - cpu::shared_start >> 4;
    memcpy(cpu::at(to, 16), &v, 16);
    cpu::unfenced[chunk] = 1, cpu::lane().unfenced.push_back(chunk);
}
inline u32 load2(u32 from) {
    u16 v;
    if (from % 2) cpu::fail("a load that is not aligned");
    memcpy(&v, cpu::at(from, 2), 2);
    return v;
}
inline uint4 load16(u32 from) {
    uint4 v;
    if (from % 16) cpu::fail("a load that is not aligned");
    memcpy(&v, cpu::at(from, 16), 16);
    return v;
}

inline u32 products(u32 a, u32 b) {
    return two(bf16::widen(a & 0xffff) * bf16::widen(b & 0xffff), bf16::widen(a >> 16) * bf16::widen(b >> 16));
}
inline u32 __byte_perm(u32 a, u32 b, u32 select) {
    const u64 both = a | (u64)b << 32;
    u32 r = 0;
    for (u32 i = 0; i < 4; ++i) r |= (u32)(both >> (select >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return r;
}

struct Two { float first, second; };
inline Two two_of_e4m3(u16 bytes) {
    auto value = [](u32 v) {
        const u32 size = v & 127;
        const float magnitude = size == 127 ? __uint_as_float(0x7fc00000) : size < 8 ? size * 0x1p-9f : __uint_as_float((size << 20) + (120 << 23));
        return v & 128 ? -magnitude : magnitude;
    };
    return {value(bytes & 0xff), value(bytes >> 8)};
}
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
