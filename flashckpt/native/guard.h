/* Memory whose loss must not end this process: a SIGBUS in it is answered with pages of zeros. No Python here. */
#ifndef FLASHCKPT_GUARD_H
#define FLASHCKPT_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Guard [start, start + nbytes), whole pages that stay mapped until `unguard`; one caller at a time.
 * Return a number for the other two, -1 where SIGBUS belongs to somebody else or too much is guarded already. */
int guard(uintptr_t start, size_t nbytes);

/* Whether a page of it was lost: what was read since `guard` may be zeros. */
bool is_lost(int number);

void unguard(int number);

#endif
