// Finds races by what CUDA promises, whatever has happened here: who reads what another thread wrote, or writes over it,
// must come behind that (PTX ISA, "Memory Consistency Model"; vector clocks of writes, as in FastTrack, Flanagan and
// Freund 2009). A barrier of the block or the warp puts all that came before it, of all who meet there, in front of what
// they do then. A counter (volatile or atomic) hands on what its writer knew at its last fence, to those who read it, from
// their next fence on. Shuffles, votes and products order nothing.
//
// g++ -fsanitize=thread calls this in front of every access of a kernel.
#ifdef PA_RACES
#include "state.h"

namespace emu {
using Clock = uint32_t;
struct Place {  // two bytes that were written, or a counter
    uint64_t key;
    uint32_t launch, owner;  // owner: the thread that wrote, or the row of a counter's message
    Clock clock;
};
// [row][thread of the grid]: what each thread knows, knew at its last fence, and will from its next one on; what a group
// has at a barrier; what counters say.
struct Rows : Array<Clock> {
    Clock* of(size_t row);
};
static Rows known, told, heard, barriers, messages;
static size_t threads, groups, counters;
static uint32_t launches;
static bool is_found;
constexpr size_t PLACES = 1 << 22, COUNTERS = 256;
constexpr Clock IS_COUNTER = ~0u;
static Place places[PLACES];

Clock* Rows::of(size_t row) { return items + row * threads; }
static size_t block() { return blockIdx.x + (size_t)gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }
static size_t self() { return block() * state.threads + current; }
static void join(Clock* to, const Clock* from) {
    for (size_t i = 0; i < threads; ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
}

void begin_races(size_t blocks, unsigned of_block) {
    threads = blocks * of_block;
    groups = 1 + of_block / PA_WAVE;
    known.assign(threads * threads);
    told.assign(threads * threads);
    heard.assign(threads * threads);
    for (size_t i = 0; i < threads; ++i) known.of(i)[i] = 1;
    barriers.assign(2 * groups * blocks * threads);
    messages.assign(COUNTERS * threads);
    counters = 0;
    ++launches;
    is_found = false;
}
bool has_races() { return is_found; }

void fence() {
    const size_t me = self();
    join(known.of(me), heard.of(me));
    memcpy(told.of(me), known.of(me), threads * sizeof(Clock));
    ++known.of(me)[me];
}

static Clock* at_barrier(unsigned group, unsigned slot) { return barriers.of((block() * groups + group) * 2 + slot); }
void arrive(unsigned group, unsigned slot, bool is_first) {
    Clock* const all = at_barrier(group, slot);
    if (is_first) memset(all, 0, threads * sizeof(Clock));
    join(all, known.of(self()));
    ++known.of(self())[self()];
}
void depart(unsigned group, unsigned slot) { join(known.of(self()), at_barrier(group, slot)); }

// null: nothing is known of it, and `makes` is false.
static Place* find(const char* address, bool makes) {
    const bool is_shared = address >= __start_shared_memory && address < __stop_shared_memory;
    const uint64_t key = (uint64_t)address / 2 | (is_shared ? (block() + 1) << 48 : 0);
    for (uint64_t i = key * 0x9e3779b97f4a7c15u >> 42;; ++i) {  // spread, wherever the arrays lie
        Place& place = places[i % PLACES];
        if (place.launch != launches) {
            if (!makes) return nullptr;
            place = {key, launches, 0, 0};
        }
        if (place.key == key) return &place;
    }
}

static bool is_own(const char* address) { return (size_t)(address - state.stacks) < STACK * state.threads; }

void note(const void* begin, unsigned bytes, bool writes) {
    const char* const first = (const char*)begin;
    if (!state.alive || is_own(first)) return;
    const size_t me = self();
    for (unsigned i = 0; i < bytes; i += 2) {
        Place* const place = find(first + i, writes);
        if (!place) continue;
        is_found |= place->clock > known.of(me)[place->owner];
        if (writes) place->owner = me, place->clock = known.of(me)[me];
    }
}

static void note_counter(const void* counter, bool writes) {
    Place* const place = find((const char*)counter, writes);
    if (!place) return;
    if (place->clock != IS_COUNTER) {
        if (!writes) return;
        if (counters == COUNTERS) abort();
        place->owner = counters++;
        place->clock = IS_COUNTER;
    }
    writes ? join(messages.of(place->owner), told.of(self())) : join(heard.of(self()), messages.of(place->owner));
}
}  // namespace emu

#define NOTE(name, bytes, ...) \
    void __tsan_##name##bytes(void* p) { __VA_ARGS__; } \
    void __tsan_unaligned_##name##bytes(void* p) { __VA_ARGS__; }
#define NOTE_ALL(bytes)                                          \
    NOTE(read, bytes, emu::note(p, bytes, false))                \
    NOTE(write, bytes, emu::note(p, bytes, true))                \
    NOTE(volatile_read, bytes, emu::note_counter(p, false))      \
    NOTE(volatile_write, bytes, emu::note_counter(p, true))
extern "C" {
NOTE_ALL(1) NOTE_ALL(2) NOTE_ALL(4) NOTE_ALL(8) NOTE_ALL(16)
void __tsan_read_range(void* p, size_t bytes) { emu::note(p, bytes, false); }
void __tsan_write_range(void* p, size_t bytes) { emu::note(p, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#endif
