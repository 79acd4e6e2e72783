// BLAKE3 of many blocks or chunks that lie in device memory.
// launch: blake3_4k, blake3_blocks: BLAKE3_THREADS (256) threads a block, one a 1 KiB leaf: ceil(bytes / 1024 / 256)
// blocks. blake3_4k_lanes: 32 threads a block, ceil(blocks / 2) blocks. blake3_chunks: 256 threads a block, a warp a
// chunk, any grid (warps loop), best ceil(count / 8) but at most 8 blocks an SM.
//
// `in` is 16-byte aligned except for blake3_chunks, where it is 4-byte aligned and offsets are any.
#include "blake3.cuh"

// At least 64, the leaves of the longest block of blake3_blocks.
#ifndef BLAKE3_THREADS
#define BLAKE3_THREADS 256
#endif
// How a leaf's next 64 bytes come while the present ones are hashed: 0 not before, 1 loads into registers (ptxas
// moves them to the end of the loop, so little is hidden), 2 copied to shared memory by four lanes a leaf, which
// makes each warp's request eight runs of 64 bytes instead of 32 of 16.
#ifndef BLAKE3_PREFETCH
#define BLAKE3_PREFETCH 2
#endif
// Runs of 64 bytes a leaf has in shared memory (a power of two), the one being hashed included.
#ifndef BLAKE3_DEPTH
#define BLAKE3_DEPTH 2
#endif
// Blocks an SM that the registers must allow; 0 leaves it to the compiler.
#ifndef BLAKE3_RESIDENT
#define BLAKE3_RESIDENT 0
#endif

#define LEAF 1024u

__device__ __forceinline__ u32 leaf_flags(u32 k) {
    return (k == 0 ? CHUNK_START : 0) | (k == 15 ? CHUNK_END : 0);
}

#if BLAKE3_PREFETCH == 2

// A warp's runs: [stage][leaf][quarter]. Quarters are permuted so that eight neighbouring leaves, read a quarter at
// a time, are in different banks.
struct Runs {
    uint4 quarter[BLAKE3_DEPTH][32][4];
};

__device__ __forceinline__ u32 place(u32 leaf, u32 quarter) { return quarter ^ (leaf >> 1 & 3); }

// The chaining values of a warp's leaves, lane by lane; `in` is the first of them, `live` how many there are.
__device__ __forceinline__ void hash_leaves(u32 (&cv)[8], Runs& runs, const u8* in, u32 live, u32 counter) {
    const u32 lane = threadIdx.x % 32;
    const u8* source = in + lane / 4 * LEAF + lane % 4 * 16;
    auto fetch = [&](u32 k) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 leaf = 8 * i + lane / 4;
            if (leaf < live) {
                copy_async(&runs.quarter[k % BLAKE3_DEPTH][leaf][place(leaf, lane % 4)], source + 8 * i * LEAF + k * 64);
            }
        }
    };
    start(cv);
#pragma unroll
    for (u32 k = 0; k + 1 < BLAKE3_DEPTH; k++) {
        fetch(k);
        commit_async();
    }
#pragma unroll 1
    for (u32 k = 0; k < 16; k++) {
        wait_async<BLAKE3_DEPTH - 2>();
        __syncwarp();
        u32 m[16];
        const uint4* run = runs.quarter[k % BLAKE3_DEPTH][lane];
        words_of(m, run[place(lane, 0)], run[place(lane, 1)], run[place(lane, 2)], run[place(lane, 3)]);
        // The stage that this overwrites was read by all lanes before the wait above.
        if (k + BLAKE3_DEPTH - 1 < 16) fetch(k + BLAKE3_DEPTH - 1);
        commit_async();
        compress(cv, m, counter, 64, leaf_flags(k));
    }
}

#else

// The chaining value of a whole leaf whose number inside its block is `counter`.
__device__ __forceinline__ void hash_leaf(u32 (&cv)[8], const u8* in, u32 counter) {
    const uint4* source = reinterpret_cast<const uint4*>(in);
    start(cv);
#if BLAKE3_PREFETCH
    uint4 a = __ldg(source), b = __ldg(source + 1), c = __ldg(source + 2), d = __ldg(source + 3);
#endif
#pragma unroll 1
    for (u32 k = 0; k < 16; k++) {
        u32 m[16];
#if BLAKE3_PREFETCH
        words_of(m, a, b, c, d);
        // The last turn asks for the same bytes again rather than for what may not be there.
        source += k < 15 ? 4 : 0;
        a = __ldg(source), b = __ldg(source + 1), c = __ldg(source + 2), d = __ldg(source + 3);
#else
        words_of(m, __ldg(source), __ldg(source + 1), __ldg(source + 2), __ldg(source + 3));
        source += 4;
#endif
        compress(cv, m, counter, 64, leaf_flags(k));
    }
}

#endif

// Hashes `leaves` leaves, each run of `fan` (a power of two, 4..64) to one digest of OUT bytes.
template <int OUT>
__device__ __forceinline__ void hash_blocks(const u8* in, u64 leaves, u32 fan, u8* out) {
    __shared__ Nodes<BLAKE3_THREADS> nodes;
    const u64 first = u64(blockIdx.x) * BLAKE3_THREADS;
    if (first >= leaves) return;
    const u32 here = leaves - first < BLAKE3_THREADS ? u32(leaves - first) : BLAKE3_THREADS;
    const u32 t = threadIdx.x;
    u32 cv[8];
#if BLAKE3_PREFETCH == 2
    __shared__ Runs runs[BLAKE3_THREADS / 32];
    const u32 warp = t / 32;
    if (warp * 32 < here) {
        const u32 live = here - warp * 32 < 32 ? here - warp * 32 : 32;
        hash_leaves(cv, runs[warp], in + (first + warp * 32) * LEAF, live, u32(first + t) & (fan - 1));
        nodes.put(t, cv);
    }
#else
    if (t < here) {
        hash_leaf(cv, in + (first + t) * LEAF, u32(first + t) & (fan - 1));
        nodes.put(t, cv);
    }
#endif
    // Parents are folded by as few warps as hold them, not by one lane in two of every warp.
    u32 live = here;
#pragma unroll 1
    for (u32 width = fan; width > 1; width /= 2) {
        __syncthreads();
        live /= 2;
        if (t < live) nodes.parent(t, cv, width == 2 ? ROOT : 0);
        __syncthreads();
        if (t < live && width > 2) nodes.put(t, cv);
    }
    if (t < live) {
        u8* digest = out + (first / fan + t) * OUT;
        *reinterpret_cast<uint4*>(digest) = make_uint4(cv[0], cv[1], cv[2], cv[3]);
        if (OUT == 32) *reinterpret_cast<uint4*>(digest + 16) = make_uint4(cv[4], cv[5], cv[6], cv[7]);
    }
}

#if BLAKE3_RESIDENT
#define BLAKE3_BOUNDS __launch_bounds__(BLAKE3_THREADS, BLAKE3_RESIDENT)
#else
#define BLAKE3_BOUNDS __launch_bounds__(BLAKE3_THREADS)
#endif

// First 16 bytes of the digest of each 4 KiB block.
extern "C" __global__ void BLAKE3_BOUNDS blake3_4k(const u8* in, u64 blocks, u8* out) {
    hash_blocks<16>(in, blocks * 4, 4, out);
}

// Digest of each block of `block_bytes`, a power of two from 4096 to 65536.
extern "C" __global__ void BLAKE3_BOUNDS blake3_blocks(const u8* in, u64 blocks, u32 block_bytes, u8* out) {
    const u32 fan = block_bytes / LEAF;
    hash_blocks<32>(in, blocks * fan, fan, out);
}

// ---- Four lanes a leaf, for batches too small to fill the machine: what counts is how long one chain of
// compressions takes. Lane q keeps column q of the state. Between columns and diagonals row b stays where it is and
// a, c, d move: b is the last to be ready and its next reader the first to start, so its way must not lead through
// a shuffle, while a, d and c are ready 3, 2 and 1 operations earlier.

#define LANES_LEAVES 8
// A leaf's bytes in shared memory are followed by 16 bytes so that the eight leaves start in different banks.
#define LANES_STRIDE (LEAF + 16)
// Whether x + rotate(y) is kept as one instruction (LEA.HI) beside the rotation that other readers need: 8 dependent
// operations for a G instead of 12.
#ifndef LANES_LEA
#define LANES_LEA 1
#endif

// Order in which a round reads the message, a nibble a word, lowest first: columns, then diagonals.
__device__ __forceinline__ u32 schedule(int round, int half) {
    constexpr u32 order[7][2] = {{0x76543210u, 0xFEDCBA98u}, {0xD407A362u, 0x8FE95CB1u}, {0xE72DCA43u, 0x18FB0956u},
                                 {0xFD3E9C7Au, 0x61852B04u}, {0x8EAFB9DCu, 0x46103527u}, {0x1FC85BE9u, 0x7462A03Du},
                                 {0x689105FBu, 0xD743C2AEu}};
    return order[round][half];
}

__device__ __forceinline__ u32 from(u32 value, u32 lane) { return __shfl_sync(0xFFFFFFFFu, value, lane, 4); }

#if LANES_LEA
// The rotation as another instruction than the one in `plus_rotated`, lest the two be merged into one that both wait for.
template <int BITS>
__device__ __forceinline__ u32 rotated(u32 x) {
    u32 result;
    asm("{\n .reg .b64 pair;\n mov.b64 pair, {%1, %1};\n shr.u64 pair, pair, %2;\n cvt.u32.u64 %0, pair;\n}"
        : "=r"(result) : "r"(x), "n"(BITS));
    return result;
}
#else
template <int BITS>
__device__ __forceinline__ u32 rotated(u32 x) { return __funnelshift_r(x, x, BITS); }
#endif

// y + (x rotated right).
template <int BITS>
__device__ __forceinline__ u32 plus_rotated(u32 y, u32 x) {
    return y + __funnelshift_l(x, x, 32 - BITS);
}

// As `mix`, but a comes last into the first sum and b as it was before its last rotation.
__device__ __forceinline__ void mix_lane(u32& a, u32& unrotated, u32& c, u32& d, u32 m0, u32 m1) {
    u32 b = rotated<7>(unrotated);
    a = plus_rotated<7>(m0, unrotated) + a;
    u32 x = d ^ a;
    d = right16(x);
    c = plus_rotated<16>(c, x);
    x = b ^ c;
    b = rotated<12>(x);
    a = plus_rotated<12>(a + m1, x);
    x = d ^ a;
    d = right8(x);
    c = plus_rotated<8>(c, x);
    unrotated = b ^ c;
}

// Two blocks of 4 KiB a warp; first 16 bytes of each digest.
extern "C" __global__ void __launch_bounds__(32) blake3_4k_lanes(const u8* in, u64 blocks, u8* out) {
    // The last 64 bytes are read ahead and never used.
    __shared__ __align__(16) u8 data[LANES_LEAVES * LANES_STRIDE + 64];
    __shared__ __align__(16) u8 folded[2][LANES_LEAVES / 2 * 64];
    const u32 lane = threadIdx.x, q = lane % 4, leaf = lane / 4;
    const u64 first = u64(blockIdx.x) * 2;
    if (first >= blocks) return;
    // An odd last block is hashed twice by its warp and stored once.
    const bool present = first + leaf / 4 < blocks;
    const u8* source = in + (present ? first + leaf / 4 : first) * 4096 + leaf % 4 * LEAF + q * 16;
    u8* slot = data + leaf * LANES_STRIDE + q * 16;
    // All of the leaf is asked for at once; the second group is waited for when it is needed.
#pragma unroll
    for (u32 k = 0; k < 16; k++) {
        copy_async(slot + k * 64, source + k * 64);
        if (k == 3 || k == 15) commit_async();
    }
    const u32 before = (q + 3) % 4, after = (q + 1) % 4, across = (q + 2) % 4;
    // Byte offsets of this lane's message words in a 64-byte block: two for the column, two for the diagonal through
    // b[q], which is number q - 1.
    u32 at[7][4];
#pragma unroll
    for (int round = 0; round < 7; round++) {
        const u32 column = schedule(round, 0) >> (8 * q), diagonal = schedule(round, 1) >> (8 * before);
        at[round][0] = (column & 15) * 4;
        at[round][1] = (column >> 4 & 15) * 4;
        at[round][2] = (diagonal & 15) * 4;
        at[round][3] = (diagonal >> 4 & 15) * 4;
    }
    const u32 iv_low = q == 0 ? IV0 : q == 1 ? IV1 : q == 2 ? IV2 : IV3;
    const u32 iv_high = q == 0 ? IV4 : q == 1 ? IV5 : q == 2 ? IV6 : IV7;
    u32 low = iv_low, high = iv_high;
    // Row d: counter, 0, length, flags. The counter of a parent is 0.
    u32 row_d = q == 0 ? leaf % 4 : q == 2 ? 64 : q == 3 ? CHUNK_START : 0;
    const u8* message = data + leaf * LANES_STRIDE;
    auto word = [&](const u8* block, u32 offset) { return *reinterpret_cast<const u32*>(block + offset); };
    wait_async<1>();
    __syncwarp();
    // The words of round 0 are read a step ahead.
    u32 ahead[4];
#pragma unroll
    for (int i = 0; i < 4; i++) ahead[i] = word(message, at[0][i]);
    // Sixteen blocks of the leaf, then two levels of parents. Neighbouring leaves both compute their parent. One copy
    // of the code for all eighteen: cold instructions cost more than these branches.
#pragma unroll 1
    for (u32 step = 0; step < 18; step++) {
        u32 a = low, unrotated = high << 7 | high >> 25, c = iv_low, d = row_d;
        if (step == 3) {
            wait_async<0>();
            __syncwarp();
        }
        u32 m[7][4];
#pragma unroll
        for (int round = 0; round < 7; round++)
#pragma unroll
            for (int i = 0; i < 4; i++) m[round][i] = round == 0 ? ahead[i] : word(message, at[round][i]);
#pragma unroll
        for (int round = 0; round < 7; round++) {
            mix_lane(a, unrotated, c, d, m[round][0], m[round][1]);
            a = from(a, before);
            d = from(d, across);
            c = from(c, after);
            if (round == 6) {
                message += 64;
#pragma unroll
                for (int i = 0; i < 4; i++) ahead[i] = word(message, at[0][i]);
            }
            mix_lane(a, unrotated, c, d, m[round][2], m[round][3]);
            a = from(a, after);
            d = from(d, across);
            c = from(c, before);
        }
        low = a ^ c;
        high = rotated<7>(unrotated) ^ d;
        if (q == 3) row_d = step == 14 ? CHUNK_END : 0;
        if (step == 15 || step == 16) {
            // Node `leaf` (step 15) or `leaf / 2` (step 16) goes to its half of its parent's message.
            const u32 node = step == 15 ? leaf : leaf / 2;
            u8* parent = folded[step - 15] + node / 2 * 64;
            u32* half = reinterpret_cast<u32*>(parent + node % 2 * 32);
            // Words read ahead and never used may have come from here.
            __syncwarp();
            half[q] = low;
            half[4 + q] = high;
            __syncwarp();
            message = parent;
#pragma unroll
            for (int i = 0; i < 4; i++) ahead[i] = word(message, at[0][i]);
            low = iv_low;
            high = iv_high;
            row_d = q == 2 ? 64 : q == 3 ? PARENT | (step == 16 ? ROOT : 0) : 0;
        }
    }
    if (present && leaf % 4 == 0) reinterpret_cast<u32*>(out)[(first + leaf / 4) * 4 + q] = low;
}

// ---- Chunks of any length, a warp each: 32 leaves at a time are folded to a node, and nodes of whole groups wait
// on a stack that is folded as a binary counter carries. The right edge follows the paper, section 2.1: the left
// subtree is the largest power of two that leaves something to the right, which pairing neighbours and passing an odd
// last node up unchanged gives.

#define CHUNK_WARPS 8
// Groups of 32 leaves double with each entry: enough for 2^26 groups, 2 TiB.
#define STACK_MAX 27

// The message words at any address: aligned words that hold at least one byte of [at, at + bytes), shifted together.
__device__ __forceinline__ void load_any(u32 (&m)[16], const u8* at, u32 bytes) {
    const u32 skip = u32(u64(at) & 3);
    const u32* word = reinterpret_cast<const u32*>(at - skip);
    u32 low = bytes > 0 ? __ldg(word) : 0;
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const u32 high = 4 * (i + 1) < skip + bytes ? __ldg(word + i + 1) : 0;
        m[i] = __funnelshift_r(low, high, 8 * skip);
        low = high;
        // Bytes past the end count as zero.
        if (bytes < 4 * i + 4) m[i] = bytes <= 4 * i ? 0 : m[i] & (0xFFFFFFFFu >> (8 * (4 * i + 4 - bytes)));
    }
}

// A leaf of `bytes` (0..1024); `root` when it is the whole chunk.
__device__ __forceinline__ void hash_any_leaf(u32 (&cv)[8], const u8* in, u32 bytes, u64 counter, bool root) {
    start(cv);
    const u32 blocks = bytes == 0 ? 1 : (bytes + 63) / 64;
#pragma unroll 1
    for (u32 k = 0; k < blocks; k++) {
        const u32 here = bytes - 64 * k < 64 ? bytes - 64 * k : 64;
        const u32 end = k + 1 == blocks ? CHUNK_END | (root ? ROOT : 0) : 0;
        u32 m[16];
        load_any(m, in + 64 * k, here);
        compress(cv, m, counter, here, (k == 0 ? CHUNK_START : 0) | end);
    }
}

struct Fold {
    Nodes<32> nodes;
    u32 stack[STACK_MAX][8];
};

// The parent of stack entry `left` and the node that lane 0 holds in cv, in lane 0's cv.
__device__ __forceinline__ void fold_left(Fold& fold, u32 left, u32 (&cv)[8], u32 flags) {
    if (threadIdx.x % 32 == 0) {
        u32 m[16];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            m[i] = fold.stack[left][i];
            m[8 + i] = cv[i];
        }
        start(cv);
        compress(cv, m, 0, 64, PARENT | flags);
    }
    __syncwarp();
}

__device__ __forceinline__ void hash_chunk(Fold& fold, const u8* in, u64 bytes, u8* out) {
    const u32 lane = threadIdx.x % 32;
    const u64 leaves = bytes == 0 ? 1 : (bytes + LEAF - 1) / LEAF;
    const u64 groups = (leaves + 31) / 32;
    u32 depth = 0;
    u32 cv[8];
#pragma unroll 1
    for (u64 group = 0; group < groups; group++) {
        const u64 leaf = group * 32 + lane;
        u32 live = leaves - group * 32 < 32 ? u32(leaves - group * 32) : 32;
        if (lane < live) {
            const u64 left = bytes - leaf * LEAF;
            hash_any_leaf(cv, in + leaf * LEAF, left < LEAF ? u32(left) : LEAF, leaf, leaves == 1);
        }
#pragma unroll 1
        while (live > 1) {
            if (lane < live) fold.nodes.put(lane, cv);
            __syncwarp();
            const u32 above = (live + 1) / 2;
            if (2 * lane + 1 < live) {
                fold.nodes.parent(lane, cv, groups == 1 && live == 2 ? ROOT : 0);
            } else if (lane < above) {
#pragma unroll
                for (int i = 0; i < 8; i++) cv[i] = fold.nodes.word[i][2 * lane];
            }
            __syncwarp();
            live = above;
        }
        if (group + 1 < groups) {
            // More follows, so no fold here can be the root.
            for (u64 carry = group + 1; carry % 2 == 0; carry /= 2) fold_left(fold, --depth, cv, 0);
            if (lane == 0) {
#pragma unroll
                for (int i = 0; i < 8; i++) fold.stack[depth][i] = cv[i];
            }
            depth++;
            __syncwarp();
        }
    }
    while (depth > 0) {
        depth--;
        fold_left(fold, depth, cv, depth == 0 ? ROOT : 0);
    }
    if (lane == 0) {
        *reinterpret_cast<uint4*>(out) = make_uint4(cv[0], cv[1], cv[2], cv[3]);
        *reinterpret_cast<uint4*>(out + 16) = make_uint4(cv[4], cv[5], cv[6], cv[7]);
    }
}

// 32 bytes for each chunk i, which is in[offsets[i], offsets[i + 1]).
extern "C" __global__ void __launch_bounds__(32 * CHUNK_WARPS)
    blake3_chunks(const u64* offsets, const u8* in, u64 count, u8* out) {
    __shared__ Fold folds[CHUNK_WARPS];
    Fold& fold = folds[threadIdx.x / 32];
    const u64 warps = u64(gridDim.x) * CHUNK_WARPS;
    for (u64 i = u64(blockIdx.x) * CHUNK_WARPS + threadIdx.x / 32; i < count; i += warps)
        hash_chunk(fold, in + offsets[i], offsets[i + 1] - offsets[i], out + i * 32);
}
