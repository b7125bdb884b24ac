// The step of the online softmax between the two products of a tile, on AMD's cards: as softmax_step of forward.cu, with
// fewer instructions. The lanes that share a row meet only where some row's maximum rises, which is a branch of a whole
// wave. Probabilities are taken of exp2(score - reference), and a reference is a number from the first tile on.
#if PA_AMD

// Probabilities that are rounded to float16 are kept this many powers of two larger, so that the smallest are 2^-31 of
// the largest; the reference that they are taken from is smaller by as much than the row's maximum.
#if PA_PAIRS == 2
#define LIFT 7.f
#define UNLIFTED(log2_of_sum) (log2_of_sum - LIFT)
#else
#define LIFT 0.f
#define UNLIFTED(log2_of_sum) log2_of_sum
#endif
// A reference is replaced where a score is larger by so much: a factor of 256 of the probabilities.
#define MOST_ABOVE ((8.f + LIFT) / UNIT_TO_LOG2)

// Of a row that has seen no key yet. No less than any score: those that no row may look at are -inf.
#define NO_REFERENCE (bits_to_float(0xff7fffffu))

INLINE float maximum_of(float reference) { return reference + LIFT / UNIT_TO_LOG2; }

INLINE float largest_of(const float (&s)[CN]) {
    float largest = largest_of_three(s[0], s[1], s[2]);
    FOR(j, (CN - 4) / 2) largest = largest_of_three(largest, s[2 * j + 3], s[2 * j + 4]);
    return larger_of(largest, s[CN - 1]);
}

INLINE float in_unit(float score, float scale_log2) {
#if PA_MASK == 2
    return score;
#else
    return score * scale_log2;
#endif
}

// In the unit of the scores' maxima; rounded once.
INLINE float above(float score, float reference, float scale_log2) {
#if PA_MASK == 2
    return score - reference;
#else
    return fmaf(score, scale_log2, -reference);
#endif
}

// One step of the online softmax on a tile's scores: S becomes exp(S - reference), the references and row_sum are brought
// up to date (row_sum holds this lane's share), and the sums so far are scaled to the new reference. With PA_PAIRS 2 the
// first half of S becomes pairs of neighbours as float16; row_sum is the sum of what they are before.
INLINE void softmax_step(float (&S)[RM][CN], float (&O)[RM][DN], float (&reference)[RM], float (&row_sum)[RM],
                         float scale_log2) {
    float largest[RM], highest = NEG_INF;
    FOR(i, RM) {
        largest[i] = largest_of(S[i]);
        highest = larger_of(highest, above(largest[i], reference[i], scale_log2));
    }
    if (ANY_LANE(highest > MOST_ABOVE)) {
        KEEP_BRANCH();
        FOR(i, RM) {
            float mx = largest[i];
            FOR(s, 4) if ((2 << s) <= PA_TX) mx = larger_of(mx, __shfl_xor_sync(FULL_WARP, mx, 2 << s));
            if (above(mx, reference[i], scale_log2) > MOST_ABOVE) {
                const float raised = in_unit(mx, scale_log2) - LIFT / UNIT_TO_LOG2;
                const float fade = exp2_approx((reference[i] - raised) * UNIT_TO_LOG2);
                reference[i] = raised;
                row_sum[i] *= fade;
                FOR(j, DN) O[i][j] *= fade;
            }
        }
    }
    FOR(i, RM) {
        float sum = 0.f;
        FOR(j, CN) {
            S[i][j] = exp2_approx(above(S[i][j], reference[i], scale_log2) * UNIT_TO_LOG2);
            sum += S[i][j];
        }
#if PA_PAIRS == 2
        FOR(j, CN / 2) S[i][j] = bits_to_float(pair_of(S[i][2 * j], S[i][2 * j + 1]));
#endif
        row_sum[i] += sum;
    }
}
#endif
