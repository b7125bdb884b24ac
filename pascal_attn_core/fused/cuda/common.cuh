// Tile geometry of the kernels on plain cores.
//
// Compile-time parameters (macros, all set by the host):
//   PA_D        head_dim of the register and shared memory tiles; the tensors' own may be smaller when PA_PAD is 1
//   PA_PAD      1: head_dim and head_dim_v are read from the parameters and columns behind them are zero
//   PA_BR/PA_BC rows of the tile that stays / of the tile that moves;  PA_TX x PA_TY thread grid
//   PA_KC       depth of a staged chunk of a row-by-row product (X Y^T);  PA_VC rows staged at a time of P Y
//   PA_PSPLIT   how many parts P is passed through shared memory in;  PA_MINB blocks that shall fit one SM
//   PA_AHEAD    1: the factors of a step of a product are read while the step before is computed
//   PA_ALL      1: gradients in five products (query_sums.cuh), undefined: other kernels
//   PA_FLUSH    tiles after which float32 sums move to the output (0: never), see flush_sums
// and on AMD's cards, with PA_AMD 1:
//   PA_WAVE     lanes of a wave
//   PA_PAIRS    1: float16 operands stay what they are in shared memory, two neighbours in a word, and row-by-row
//               products are dot products of pairs with float32 sums. 2: P is rounded to float16 for P Y, which is one too
//   PA_KEEP     1: the whole tile that stays lies in shared memory, staged once
#if !PA_AMD
#define PA_PAIRS 0
#define PA_KEEP 0
#endif
#define PA_NT (PA_TX * PA_TY)
#define RM (PA_BR / PA_TY)         // rows of S and of the sums per thread
#define CN (PA_BC / PA_TX)         // columns of S per thread
#define DN (PA_D / PA_TX)          // columns of the sums per thread
#define DN4 (DN / 4)
#define DNR (DN % 4)
#define PCOLS (PA_BC / PA_PSPLIT)  // columns of P in shared memory at a time

#if (CN % 4) || (RM % 4) || ((CN / PA_PSPLIT) % 4) || (PCOLS % PA_VC) || (PA_VC % 4) || (PA_D % PA_TX)
#error "unsupported tile geometry"
#endif
#if PA_D % PA_KC && !PA_PAD
#error "unsupported chunk of the head dimension"
#endif
#if (PA_NT % PA_BR) || (PA_NT % PA_BC) || (PA_KC % (PA_PAIRS ? 8 : 4))
#error "unsupported staging geometry"
#endif
#if !PA_AMD && ((PA_BR * PA_KC) % (4 * PA_NT) || (PA_BC * PA_KC) % (4 * PA_NT))
#error "unsupported staging geometry"
#endif
#if PA_TX > 16
#error "the shuffles of a row reach 32 lanes"
#endif
