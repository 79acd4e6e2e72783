// Parity and the hash of every block, data and parity, in one pass: each input byte is read from memory once.
// launch: encode_blake3_R: 256 threads a block; any grid (blocks loop), best resident: 4 blocks an SM.
//
// A thread block takes a group of 4 KiB rows across all columns, 64 bytes of every leaf at a time: the columns' runs
// come to shared memory, parity is made of them and put beside them, and a thread a leaf hashes data and parity alike.
// Hashes are 16 bytes, column-major: in_hashes[(c * rows + row) * 16], rows = len / 4096; out_hashes the same.
// n + R <= COLUMNS_FUSED; len is a multiple of 4096, lds of 16. Tables: R x n, from row 0 (gf_table.cuh).
#include "blake3.cuh"
#include "gf_table.cuh"

// Leaves of a group over all columns. Each needs 96 bytes of shared memory: 64 of data and a chaining value, so this
// takes the 48 KiB that every device grants without asking.
#define LEAVES_MAX 512
// A group is at least one row of four leaves in each column.
#define COLUMNS_FUSED (LEAVES_MAX / 4)

struct Shared {
    // 64 bytes of every leaf, its quarters permuted so that neighbours' are in different banks.
    uint4 quarter[LEAVES_MAX][4];
    Nodes<LEAVES_MAX> nodes;
};

__device__ __forceinline__ uint4& quarter_of(Shared& shared, u32 leaf, u32 quarter) {
    return shared.quarter[leaf][quarter ^ (leaf >> 1 & 3)];
}

// value / divisor for values below 65536, with reciprocal = 2^32 / divisor rounded up.
__device__ __forceinline__ u32 divided(u32 value, u32 reciprocal) { return __umulhi(value, reciprocal); }

__device__ __forceinline__ Products table_at(const u32* tables, u64 index) {
    const u32* t = tables + index * TABLE_WORDS;
    return Products{__ldg(t), __ldg(t + 1), __ldg(t + 2), __ldg(t + 3), __ldg(t + 4)};
}

// Rows of parity that a thread makes of the bytes it has looked up selectors for.
template <int ROWS>
struct PerThread {
    static constexpr int ROWS_AT_ONCE = ROWS % 4 == 0 ? 2 : ROWS;
};

template <int ROWS>
__device__ __forceinline__ void encode_blake3(const u32* tables, const u8* in, u64 in_ld, u8* out, u64 out_ld, u64 len,
                                              u32 n, u8* in_hashes, u8* out_hashes) {
    __shared__ Shared shared;
    constexpr u32 AT_ONCE = PerThread<ROWS>::ROWS_AT_ONCE;
    const u32 columns = n + ROWS;
    // The host never asks for more; going on would overrun the shared memory.
    if (columns > COLUMNS_FUSED) __trap();
    const u64 rows = len / 4096;
    const u32 group_rows = LEAVES_MAX / 4 / columns;
    for (u64 row0 = u64(blockIdx.x) * group_rows; row0 < rows; row0 += u64(gridDim.x) * group_rows) {
        const u32 here = rows - row0 < group_rows ? u32(rows - row0) : group_rows;
        // Leaves of one column in this group; leaf `c * wide + i` is leaf i of column c.
        const u32 wide = here * 4;
        const u32 leaves = columns * wide;
        const u32 reciprocal = 0xFFFFFFFFu / wide + 1;
        for (u32 leaf = threadIdx.x; leaf < leaves; leaf += blockDim.x) {
            u32 cv[8];
            start(cv);
            shared.nodes.put(leaf, cv);
        }
#pragma unroll 1
        for (u32 k = 0; k < 16; k++) {
            const u64 base = row0 * 4096 + k * 64;
            for (u32 i = threadIdx.x; i < n * wide * 4; i += blockDim.x) {
                const u32 leaf = i / 4, column = divided(leaf, reciprocal);
                copy_async(&quarter_of(shared, leaf, i % 4),
                           in + column * in_ld + base + u64(leaf - column * wide) * 1024 + i % 4 * 16);
            }
            commit_async();
            wait_async<0>();
            __syncthreads();
            for (u32 i = threadIdx.x; i < wide * 4 * (ROWS / AT_ONCE); i += blockDim.x) {
                // Neighbouring threads share the rows and so the tables' words.
                const u32 share = divided(i / 4, reciprocal), first = share * AT_ONCE;
                const u32 leaf = i / 4 - share * wide, quarter = i % 4;
                Split acc[AT_ONCE] = {};
#pragma unroll 2
                for (u32 column = 0; column < n; column++) {
                    const Selectors s = selectors(quarter_of(shared, column * wide + leaf, quarter));
#pragma unroll
                    for (u32 row = 0; row < AT_ONCE; row++)
                        add_product(acc[row], s, table_at(tables, u64(first + row) * n + column));
                }
#pragma unroll
                for (u32 row = 0; row < AT_ONCE; row++) {
                    const uint4 parity = joined(acc[row]);
                    quarter_of(shared, (n + first + row) * wide + leaf, quarter) = parity;
                    store_once(out + (first + row) * out_ld + base + u64(leaf) * 1024 + quarter * 16, parity);
                }
            }
            __syncthreads();
#pragma unroll 1
            for (u32 leaf = threadIdx.x; leaf < leaves; leaf += blockDim.x) {
                u32 m[16], cv[8];
                words_of(m, quarter_of(shared, leaf, 0), quarter_of(shared, leaf, 1), quarter_of(shared, leaf, 2),
                         quarter_of(shared, leaf, 3));
#pragma unroll
                for (int i = 0; i < 8; i++) cv[i] = shared.nodes.word[i][leaf];
                compress(cv, m, leaf % 4, 64, (k == 0 ? CHUNK_START : 0) | (k == 15 ? CHUNK_END : 0));
                shared.nodes.put(leaf, cv);
            }
            __syncthreads();
        }
        // Two levels of parents; `wide` is a multiple of four, so no pair crosses columns. At most 256 first parents,
        // one for each thread.
        u32 live = leaves / 2;
        u32 cv[8];
#pragma unroll 1
        for (u32 level = 0; level < 2; level++, live /= 2) {
            if (threadIdx.x < live) shared.nodes.parent(threadIdx.x, cv, level == 1 ? ROOT : 0);
            __syncthreads();
            if (threadIdx.x < live && level == 0) shared.nodes.put(threadIdx.x, cv);
            __syncthreads();
        }
        if (threadIdx.x < columns * here) {
            const u32 column = threadIdx.x / here;
            const u64 row = row0 + threadIdx.x % here;
            u8* hashes = column < n ? in_hashes + column * rows * 16 : out_hashes + (column - n) * rows * 16;
            *reinterpret_cast<uint4*>(hashes + row * 16) = make_uint4(cv[0], cv[1], cv[2], cv[3]);
        }
    }
}

#define KERNEL(ROWS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 4) encode_blake3_##ROWS(                                    \
        const u32* tables, const u8* in, u64 in_ld, u8* out, u64 out_ld, u64 len, u32 n, u8* in_hashes,           \
        u8* out_hashes) {                                                                                         \
        encode_blake3<ROWS>(tables, in, in_ld, out, out_ld, len, n, in_hashes, out_hashes);                       \
    }

KERNEL(1)
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(8)
