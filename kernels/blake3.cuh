// BLAKE3's compression function (hash mode, no key), one thread a compression. Source: the BLAKE3 paper, section 2.
#pragma once
#include "types.cuh"

#define CHUNK_START 1u
#define CHUNK_END 2u
#define PARENT 4u
#define ROOT 8u

#define IV0 0x6A09E667u
#define IV1 0xBB67AE85u
#define IV2 0x3C6EF372u
#define IV3 0xA54FF53Au
#define IV4 0x510E527Fu
#define IV5 0x9B05688Cu
#define IV6 0x1F83D9ABu
#define IV7 0x5BE0CD19u

// How many of G's six additions are written as multiply-adds: 0 none, 1 the two c + d, 2 all. The integer pipe runs
// at half the issue rate and carries every XOR and rotation; multiply-adds run beside it on another pipe.
#ifndef BLAKE3_MADS
#define BLAKE3_MADS 2
#endif

#if BLAKE3_MADS > 0
// One, but the compiler must not know, or it turns the multiply-add back into an addition.
__constant__ u32 blake3_one = 1;

__device__ __forceinline__ u32 add_mad(u32 x, u32 y) {
    return x * blake3_one + y;
}
#else
__device__ __forceinline__ u32 add_mad(u32 x, u32 y) { return x + y; }
#endif

__device__ __forceinline__ u32 add3(u32 a, u32 b, u32 m) {
#if BLAKE3_MADS > 1
    // The message joins `a` ahead of `b`, which comes last.
    return add_mad(b, add_mad(m, a));
#else
    return a + m + b;
#endif
}

__device__ __forceinline__ u32 right16(u32 x) { return __byte_perm(x, x, 0x1032); }
__device__ __forceinline__ u32 right12(u32 x) { return __funnelshift_r(x, x, 12); }
__device__ __forceinline__ u32 right8(u32 x) { return __byte_perm(x, x, 0x0321); }
__device__ __forceinline__ u32 right7(u32 x) { return __funnelshift_r(x, x, 7); }

__device__ __forceinline__ void mix(u32& a, u32& b, u32& c, u32& d, u32 m0, u32 m1) {
    a = add3(a, b, m0);
    d = right16(d ^ a);
    c = add_mad(d, c);
    b = right12(b ^ c);
    a = add3(a, b, m1);
    d = right8(d ^ a);
    c = add_mad(d, c);
    b = right7(b ^ c);
}

__device__ __forceinline__ void start(u32 (&cv)[8]) {
    cv[0] = IV0;
    cv[1] = IV1;
    cv[2] = IV2;
    cv[3] = IV3;
    cv[4] = IV4;
    cv[5] = IV5;
    cv[6] = IV6;
    cv[7] = IV7;
}

// cv becomes the chaining value after one block of 16 words; of a root block, the first 32 bytes of the digest.
__device__ __forceinline__ void compress(u32 (&cv)[8], const u32 (&words)[16], u64 counter, u32 bytes, u32 flags) {
    u32 m[16], v[16];
#pragma unroll
    for (int i = 0; i < 16; i++) m[i] = words[i];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = cv[i];
    v[8] = IV0;
    v[9] = IV1;
    v[10] = IV2;
    v[11] = IV3;
    v[12] = u32(counter);
    v[13] = u32(counter >> 32);
    v[14] = bytes;
    v[15] = flags;
#pragma unroll
    for (int round = 0; round < 7; round++) {
        mix(v[0], v[4], v[8], v[12], m[0], m[1]);
        mix(v[1], v[5], v[9], v[13], m[2], m[3]);
        mix(v[2], v[6], v[10], v[14], m[4], m[5]);
        mix(v[3], v[7], v[11], v[15], m[6], m[7]);
        mix(v[0], v[5], v[10], v[15], m[8], m[9]);
        mix(v[1], v[6], v[11], v[12], m[10], m[11]);
        mix(v[2], v[7], v[8], v[13], m[12], m[13]);
        mix(v[3], v[4], v[9], v[14], m[14], m[15]);
        // Only names change: the loop is unrolled.
        const u32 t[16] = {m[2],  m[6],  m[3],  m[10], m[7], m[0],  m[4],  m[13],
                           m[1], m[11], m[12], m[5],  m[9], m[14], m[15], m[8]};
#pragma unroll
        for (int i = 0; i < 16; i++) m[i] = t[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) cv[i] = v[i] ^ v[i + 8];
}

__device__ __forceinline__ void words_of(u32 (&m)[16], uint4 a, uint4 b, uint4 c, uint4 d) {
    m[0] = a.x, m[1] = a.y, m[2] = a.z, m[3] = a.w;
    m[4] = b.x, m[5] = b.y, m[6] = b.z, m[7] = b.w;
    m[8] = c.x, m[9] = c.y, m[10] = c.z, m[11] = c.w;
    m[12] = d.x, m[13] = d.y, m[14] = d.z, m[15] = d.w;
}

// Chaining values of a block's leaves in shared memory, word by word, so that neighbours never share a bank; and
// the pairwise folding of them, which leaves half as many threads at work with each level.
template <int LEAVES>
struct Nodes {
    u32 word[8][LEAVES];

    __device__ __forceinline__ void put(u32 at, const u32 (&cv)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) word[i][at] = cv[i];
    }

    // cv becomes the parent of nodes 2 * at and 2 * at + 1.
    __device__ __forceinline__ void parent(u32 at, u32 (&cv)[8], u32 flags) const {
        u32 m[16];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint2 pair = *reinterpret_cast<const uint2*>(&word[i][2 * at]);
            m[i] = pair.x;
            m[8 + i] = pair.y;
        }
        start(cv);
        compress(cv, m, 0, 64, PARENT | flags);
    }
};
