/* Rows against /proc/self/maps: exact for what is mapped and with which rights. Linux 6.11 and later are asked for the few
 * mappings that rows lie in; else the file is read, half a millisecond per thousand mappings whatever the rows are. A file
 * that was cut short keeps its mapping: there the last byte is tried. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "check.h"

struct mapping {
    uint64_t start, stop;
    int readable, writable, has_file;
    uint64_t used;              /* where the last byte ends that rows use of it */
    size_t row;                 /* whose */
    int used_as_target;
};

/* As <linux/fs.h> of Linux 6.11 has it: the mapping that holds an address. */
struct query {
    uint64_t size, wanted, address, start, stop, rights, page_size, offset, inode;
    uint32_t device[2], name_size, build_id_size;
    uint64_t name, build_id;
};
#define PROCMAP_QUERY _IOWR('f', 17, struct query)
#define READABLE 1
#define WRITABLE 2
#define MOST_QUERIES 128 /* as many take as long as reading the file does */

struct map {
    struct mapping *mappings; /* in the order of addresses, or of queries */
    size_t count, room;
    int file; /* to be asked; negative: all mappings are here */
};

enum map_result { MAP_READ, MAP_NOT_THERE, MAP_NO_MEMORY };

static struct finding found(enum problem problem, size_t row) { return (struct finding){problem, row, row}; }

/* False: there is no memory for it. */
static int add(struct map *map, struct mapping one) {
    if (map->count == map->room) {
        size_t room = map->room ? 2 * map->room : MOST_QUERIES;
        struct mapping *more = realloc(map->mappings, room * sizeof *more);
        if (more == NULL) return 0;
        map->mappings = more;
        map->room = room;
    }
    map->mappings[map->count++] = one;
    return 1;
}

static const char *read_hex(const char *at, uint64_t *value) {
    for (*value = 0;; at++) {
        int digit = *at >= '0' && *at <= '9' ? *at - '0' : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : -1;
        if (digit < 0) return at;
        *value = *value << 4 | (uint64_t)digit;
    }
}

/* Take one line, "start-stop rwxp offset device inode path". A mapping that grew while the file was read comes twice. */
static enum map_result take_line(struct map *map, const char *line) {
    struct mapping one = {0};
    uint64_t ignored;
    const char *at = read_hex(line, &one.start);
    if (*at != '-') return MAP_READ;
    at = read_hex(at + 1, &one.stop);
    if (at[0] != ' ' || strlen(at) < 6) return MAP_READ;
    one.readable = at[1] == 'r';
    one.writable = at[2] == 'w';
    at = read_hex(at + 6, &ignored); /* offset */
    if (*at == ' ') at++;
    while (*at != ' ' && *at != '\0') at++; /* device */
    one.has_file = at[0] == ' ' && at[1] >= '1' && at[1] <= '9'; /* inode */
    if (map->count && one.start < map->mappings[map->count - 1].stop) one.start = map->mappings[map->count - 1].stop;
    return one.start >= one.stop || add(map, one) ? MAP_READ : MAP_NO_MEMORY;
}

/* Take the whole lines of a buffer; returns the bytes they have. */
static size_t take_lines(struct map *map, char *buffer, size_t held, enum map_result *result) {
    size_t start = 0;
    for (char *end; *result == MAP_READ && (end = memchr(buffer + start, '\n', held - start)) != NULL;) {
        *end = '\0';
        *result = take_line(map, buffer + start);
        start = (size_t)(end - buffer) + 1;
    }
    return start;
}

static enum map_result read_map(struct map *map, int file) {
    char buffer[16384]; /* longer than any line: a path has at most 4096 bytes, four times that if escaped */
    enum map_result result = MAP_READ;
    size_t held = 0;
    while (result == MAP_READ) {
        ssize_t got = read(file, buffer + held, sizeof buffer - held);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            if (got < 0 || map->count == 0) result = MAP_NOT_THERE;
            break;
        }
        held += (size_t)got;
        size_t taken = take_lines(map, buffer, held, &result);
        if (taken == 0 && held == sizeof buffer) result = MAP_NOT_THERE; /* no line is that long */
        held -= taken;
        memmove(buffer, buffer + taken, held);
    }
    return result;
}

static int ask(int file, uint64_t address, struct query *query) {
    *query = (struct query){.size = sizeof *query, .address = address};
    return ioctl(file, PROCMAP_QUERY, query);
}

/* Ask for the mapping that holds an address; count where there is none, or nothing can be asked any more. */
static size_t asked(struct map *map, uint64_t address) {
    struct query query;
    if (map->count == MOST_QUERIES || (ask(map->file, address, &query) != 0 && errno != ENOENT)) map->file = -1;
    if (map->file < 0 || query.stop == 0) return map->count;
    struct mapping one = {.start = query.start, .stop = query.stop, .has_file = query.inode != 0};
    one.readable = (query.rights & READABLE) != 0;
    one.writable = (query.rights & WRITABLE) != 0;
    if (!add(map, one)) map->file = -1;
    return map->file < 0 ? map->count : map->count - 1;
}

/* The mapping that holds an address, or count; `hint` is tried first. */
static size_t mapping_of(struct map *map, uint64_t address, size_t hint) {
    if (hint < map->count && map->mappings[hint].start <= address && address < map->mappings[hint].stop) return hint;
    if (map->file >= 0) return asked(map, address);
    size_t low = 0, high = map->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (map->mappings[middle].stop <= address) low = middle + 1;
        else high = middle;
    }
    return low < map->count && map->mappings[low].start <= address ? low : map->count;
}

static enum problem check_range(struct map *map, uint64_t start, uint64_t stop, size_t row, int is_target,
                                size_t *hint) {
    for (uint64_t reached = start; reached < stop;) {
        size_t at = mapping_of(map, reached, *hint);
        if (at >= map->count) return is_target ? TARGET_UNMAPPED : SOURCE_UNMAPPED;
        struct mapping *one = &map->mappings[at];
        if (is_target && !one->writable) return TARGET_READ_ONLY;
        if (!is_target && !one->readable) return SOURCE_UNREADABLE;
        reached = one->stop < stop ? one->stop : stop;
        if (one->has_file && reached > one->used) {
            one->used = reached;
            one->row = row;
            one->used_as_target = is_target;
        }
        *hint = at;
    }
    return FINE;
}

static struct finding check_rows_in(struct map *map, const struct row *rows, size_t count) {
    size_t source_hint = 0, target_hint = 0;
    for (size_t k = 0; k < count; k++) {
        if (rows[k].nbytes <= 0) continue;
        uint64_t nbytes = (uint64_t)rows[k].nbytes, source = (uint64_t)rows[k].source, target = (uint64_t)rows[k].target;
        enum problem problem = check_range(map, source, source + nbytes, k, 0, &source_hint);
        if (problem == FINE && target != 0) problem = check_range(map, target, target + nbytes, k, 1, &target_hint);
        if (problem != FINE) return found(problem, k);
    }
    return found(FINE, 0);
}

/* Let the kernel read the last byte used of each file: it answers where a load would end this process by SIGBUS.
 * Through a pipe, because that is an ordinary access: process_vm_readv refuses memory of devices, which can be read. */
static struct finding try_ends(const struct map *map) {
    struct finding result = found(FINE, 0);
    int ends[2] = {-1, -1};
    for (size_t k = 0; k < map->count && result.problem == FINE; k++) {
        const struct mapping *one = &map->mappings[k];
        char byte;
        if (one->used == 0) continue;
        if (ends[0] < 0 && pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) break; /* no descriptor left: not known */
        if (write(ends[1], (const void *)(uintptr_t)(one->used - 1), 1) == 1) {
            if (read(ends[0], &byte, 1) != 1) break;
        } else if (errno == EFAULT) {
            result = found(one->used_as_target ? TARGET_CUT_SHORT : SOURCE_CUT_SHORT, one->row);
        }
    }
    if (ends[0] >= 0) {
        close(ends[0]);
        close(ends[1]);
    }
    return result;
}

/* What the kernel says of each mapping; `is_known` is false where it cannot be asked, or not as often. */
static struct finding check_asking(int file, const struct row *rows, size_t count, int *is_known) {
    struct map map = {.file = file};
    struct query query;
    struct finding result = found(FINE, 0);
    *is_known = 0;
    if (ask(file, (uint64_t)(uintptr_t)&query, &query) != 0) return result;
    result = check_rows_in(&map, rows, count);
    *is_known = map.file >= 0;
    if (*is_known && result.problem == FINE) result = try_ends(&map);
    free(map.mappings);
    return result;
}

static struct finding check_reading(int file, const struct row *rows, size_t count) {
    struct map map = {.file = -1};
    struct finding result = found(FINE, 0);
    enum map_result read = read_map(&map, file);
    if (read == MAP_NO_MEMORY) result = found(NO_MEMORY, 0);
    if (read == MAP_READ) result = check_rows_in(&map, rows, count);
    if (read == MAP_READ && result.problem == FINE) result = try_ends(&map);
    free(map.mappings);
    return result;
}

static struct finding check_once(const struct row *rows, size_t count) {
    int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), is_known;
    if (file < 0) return found(FINE, 0);
    struct finding result = check_asking(file, rows, count, &is_known);
    if (!is_known) result = check_reading(file, rows, count);
    close(file);
    return result;
}

struct finding check_memory(const struct row *rows, size_t count) {
    struct finding result = check_once(rows, count);
    /* the map is read in parts while other threads change theirs: a refusal must be seen twice */
    return result.problem == FINE ? result : check_once(rows, count);
}
