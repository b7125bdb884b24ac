// Which keys a query may look at.

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE int max_int(int a, int b) { return a > b ? a : b; }

// Which keys a query row may look at: row i sees keys i + low ... i + high (within [0, keys)).
struct Band {
    int low, high;
};
