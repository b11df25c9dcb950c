/* For User Mode Linux up to 6.12, by LD_PRELOAD: lets it set the registers of its processes where the processor has
 * more of them than it knows (AMX). It keeps 2,696 bytes of them; the host's kernel takes all of them or refuses
 * (ptrace(2), PTRACE_SETREGSET: EFAULT), and the machine panics in its first process. The registers that are cut off
 * are written as zero bytes, "in their first state": a process of such a machine has no permission to use AMX. */
#define _GNU_SOURCE
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char registers[1 << 16]; /* not on the stack: a kernel's is small, and that kernel has one thread */

static int is_peek(int request) { return request >= PTRACE_PEEKTEXT && request <= PTRACE_PEEKUSER; }

long ptrace(enum __ptrace_request request, ...) {
    va_list rest;
    va_start(rest, request);
    pid_t process = va_arg(rest, pid_t);
    void *address = va_arg(rest, void *);
    void *data = va_arg(rest, void *);
    va_end(rest);

    long word = 0; /* what a peek finds: the system call writes it, the function of the C library returns it */
    struct iovec all = {registers, sizeof registers};
    if (is_peek(request)) data = &word;
    if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
        const struct iovec *known = data;
        if (syscall(SYS_ptrace, PTRACE_GETREGSET, process, address, &all) == 0 && all.iov_len > known->iov_len) {
            memset(registers, 0, all.iov_len);
            memcpy(registers, known->iov_base, known->iov_len);
            data = &all;
        }
    }
    long result = syscall(SYS_ptrace, request, process, address, data);
    return is_peek(request) && result == 0 ? word : result;
}
