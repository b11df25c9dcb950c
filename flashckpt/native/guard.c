#define _GNU_SOURCE

#include "guard.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_RANGES 256

/* Written by one thread at a time, read by handlers in any: `low` is 0 while the others are not valid. */
struct range {
    _Atomic uintptr_t low, high;
    _Atomic int lost;
};

static struct range ranges[MOST_RANGES];
static struct sigaction before; /* what SIGBUS did until `install` */
static uintptr_t page_bytes;
static bool installed;

/* Only the range and its mark: the read continues with zeros, and whoever guards the range asks afterwards. */
static bool replace_lost_pages(uintptr_t address) {
    for (int k = 0; k < MOST_RANGES; k++) {
        uintptr_t low = atomic_load(&ranges[k].low), high = atomic_load(&ranges[k].high);
        if (low == 0 || address < low || address >= high) continue;
        atomic_store(&ranges[k].lost, 1); /* before a byte of the zeros can be read */
        uintptr_t from = address - address % page_bytes;
        /* all that follow, too: a file that was cut short would raise a signal for every one of them */
        return mmap((void *)from, high - from, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                    0) != MAP_FAILED;
    }
    return false;
}

static void pass_on(int number, siginfo_t *info, void *context) {
    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else { /* an access is repeated and then ends the process; a signal that was sent is sent again */
        sigaction(SIGBUS, &before, NULL);
        if (info->si_code <= 0) raise(SIGBUS);
    }
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    int kept = errno;
    /* si_code > 0: from the kernel, so that si_addr is an address */
    if (info->si_code <= 0 || !replace_lost_pages((uintptr_t)info->si_addr)) pass_on(number, info, context);
    errno = kept;
}

static bool is_ours(void) {
    struct sigaction now;
    return sigaction(SIGBUS, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_bus_error;
}

/* Once: a handler that was put over ours may call ours, so that ours must not be put over it again. */
static bool install(void) {
    if (installed) return is_ours();
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    action.sa_sigaction = on_bus_error;
    sigemptyset(&action.sa_mask);
    installed = sigaction(SIGBUS, &action, &before) == 0;
    return installed;
}

int guard(uintptr_t start, size_t nbytes) {
    if (start == 0 || nbytes == 0 || !install()) return -1;
    for (int k = 0; k < MOST_RANGES; k++) {
        if (atomic_load(&ranges[k].low) != 0) continue;
        atomic_store(&ranges[k].lost, 0);
        atomic_store(&ranges[k].high, start + nbytes);
        atomic_store(&ranges[k].low, start);
        return k;
    }
    return -1;
}

bool is_lost(int number) { return number >= 0 && number < MOST_RANGES && atomic_load(&ranges[number].lost) != 0; }

void unguard(int number) {
    if (number >= 0 && number < MOST_RANGES) atomic_store(&ranges[number].low, 0);
}
