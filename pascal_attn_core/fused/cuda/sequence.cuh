// One sequence of a batch. Sequences of different lengths lie one behind the other, without padding: cu_q and cu_k hold
// the first token of each and, behind the last, their number. lower_right: the band begins in the corner of the last
// query and the last key.
struct Sequence {
    int lq, lk;
    Band band;
};

// Not kept: made anew where it is needed, it takes no registers of the sums (OPAQUE).
template <class P>
INLINE Sequence sequence_of(const P& p, int b) {
    OPAQUE_UNIFORM(b);
    Sequence s;
    s.lq = p.cu_q ? p.cu_q[b + 1] - p.cu_q[b] : p.lq;
    s.lk = p.cu_q ? p.cu_k[b + 1] - p.cu_k[b] : p.lk;
    const int corner = p.lower_right ? s.lk - s.lq : 0;
    s.band.low = p.low + corner;
    s.band.high = p.high + corner;
    return s;
}

// Where a sequence begins, in elements: by its number in a batch, or by its first token.
INLINE i64 sequence_at(const int* first_tokens, int b, i64 batch_stride, i64 token_stride) {
    OPAQUE_UNIFORM(b);
    return first_tokens ? first_tokens[b] * token_stride : b * batch_stride;
}
