// Products in GF(2^8), polynomial 0x11D, by byte-permute: the tables that rs_table, rs_delta and fused share.
//
// A byte x is the sum of its low three bits, the next three and the top two, so c * x is the XOR of three small table
// entries, and prmt looks four of them up at once. Its selectors are nibbles, data are bytes: two words of data are
// interleaved nibble by nibble, so results come out with the bytes of the two words alternating. Accumulators stay in
// that order (`Split`) until the end. Tables are made by the host: for each (row, column) five words, row-major:
// products of 0..7 (two words), of 0..7 << 3 (two), of 0..3 << 6 (one).
#pragma once
#include "types.cuh"

#define TABLE_WORDS 5

// Where the 16 bytes of a thread keep their selectors: three for each half of each pair of words.
struct Selectors {
    u32 low[4];
    u32 mid[4];
    u32 top[4];
};

// Sixteen accumulated bytes in interleaved order.
struct Split {
    u32 word[4];
};

struct Products {
    u32 low0, low1, mid0, mid1, top;
};

__device__ __forceinline__ void select_pair(u32 w0, u32 w1, u32* low, u32* mid, u32* top) {
    // Nibble 2i of a selector belongs to byte i of w0, nibble 2i + 1 to byte i of w1.
    const u32 l = (w0 & 0x07070707u) | ((w1 << 4) & 0x70707070u);
    const u32 m = ((w0 >> 3) & 0x07070707u) | ((w1 << 1) & 0x70707070u);
    const u32 t = ((w0 >> 6) & 0x03030303u) | ((w1 >> 2) & 0x30303030u);
    low[0] = l;
    low[1] = l >> 16;
    mid[0] = m;
    mid[1] = m >> 16;
    top[0] = t;
    top[1] = t >> 16;
}

__device__ __forceinline__ Selectors selectors(uint4 data) {
    Selectors s;
    select_pair(data.x, data.y, s.low, s.mid, s.top);
    select_pair(data.z, data.w, s.low + 2, s.mid + 2, s.top + 2);
    return s;
}

// acc ^= c * data, with c's tables in `p`.
__device__ __forceinline__ void add_product(Split& acc, const Selectors& s, const Products& p) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        acc.word[i] ^= __byte_perm(p.low0, p.low1, s.low[i]) ^ __byte_perm(p.mid0, p.mid1, s.mid[i]) ^
                       __byte_perm(p.top, 0, s.top[i]);
    }
}

__device__ __forceinline__ uint4 joined(const Split& acc) {
    return make_uint4(__byte_perm(acc.word[0], acc.word[1], 0x6420), __byte_perm(acc.word[0], acc.word[1], 0x7531),
                      __byte_perm(acc.word[2], acc.word[3], 0x6420), __byte_perm(acc.word[2], acc.word[3], 0x7531));
}

__device__ __forceinline__ Split split(uint4 data) {
    Split acc;
    acc.word[0] = __byte_perm(data.x, data.y, 0x5140);
    acc.word[1] = __byte_perm(data.x, data.y, 0x7362);
    acc.word[2] = __byte_perm(data.z, data.w, 0x5140);
    acc.word[3] = __byte_perm(data.z, data.w, 0x7362);
    return acc;
}

// A pass's tables in shared memory, column by column, as one 16-byte and one 4-byte load a product.
// ROWS * COLUMNS_MAX * 20 bytes: 40800 for eight rows, inside the 48 KiB that every device grants without asking.
#define COLUMNS_MAX 255

template <int ROWS>
struct SharedTables {
    uint4 low_mid[COLUMNS_MAX * ROWS];
    u32 top[COLUMNS_MAX * ROWS];

    // Rows [row0, row0 + ROWS) of an (any x n) list of tables. The block must synchronise afterwards.
    __device__ __forceinline__ void fill(const u32* tables, u32 n, u32 row0) {
        for (u32 i = threadIdx.x; i < n * ROWS; i += blockDim.x) {
            const u32 column = i / ROWS, row = i % ROWS;
            const u32* t = tables + (u64(row0 + row) * n + column) * TABLE_WORDS;
            low_mid[i] = make_uint4(t[0], t[1], t[2], t[3]);
            top[i] = t[4];
        }
    }

    __device__ __forceinline__ Products at(u32 column, u32 row) const {
        const uint4 w = low_mid[column * ROWS + row];
        return Products{w.x, w.y, w.z, w.w, top[column * ROWS + row]};
    }
};
