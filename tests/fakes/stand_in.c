/* The log, the faults and the counted memory of the stand-ins. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LOG_BYTES = 1 << 22, /* a rank that lives through a whole test-suite forgets its oldest calls,
                            half a log at a time */
    LINE_BYTES = 256,
    NAME_BYTES = 64,
    MAX_FAULTS = 32,
    LOCKED_BYTES = 1 << 12,
};

struct fault {
    char function[NAME_BYTES];
    int code, calls_left;
};

struct allocation {
    struct allocation *next;
    void *address;
    size_t nbytes;
    int device;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char log_text[LOG_BYTES];
static size_t log_length;
static struct fault faults[MAX_FAULTS];
static bool has_faults; /* or has had some: most processes never do */
static struct allocation *allocations;
static char with_lock[LOCKED_BYTES]; /* names of functions, a line each */

/* ---- the log ---- */

static void forget_older_half(void) {
    const char *kept =
        (const char *)memchr(log_text + log_length / 2, '\n', log_length - log_length / 2) + 1;
    log_length -= (size_t)(kept - log_text);
    memmove(log_text, kept, log_length);
}

static void append(const char *call, va_list arguments) {
    if (log_length + LINE_BYTES > LOG_BYTES) {
        forget_older_half();
    }
    int length = vsnprintf(log_text + log_length, LINE_BYTES - 1, call, arguments);
    log_length += (size_t)(length < LINE_BYTES - 2 ? length : LINE_BYTES - 2);
    log_text[log_length++] = '\n';
}

static size_t copied(const char *text, size_t length, char *out, size_t nbytes) {
    if (nbytes > 0) {
        size_t n = length < nbytes ? length : nbytes - 1;
        memcpy(out, text, n);
        out[n] = '\0';
    }
    return length;
}

size_t stand_in_log(char *out, size_t nbytes) {
    pthread_mutex_lock(&mutex);
    size_t length = copied(log_text, log_length, out, nbytes);
    pthread_mutex_unlock(&mutex);
    return length;
}

void stand_in_clear_log(void) {
    pthread_mutex_lock(&mutex);
    log_length = 0;
    pthread_mutex_unlock(&mutex);
}

/* ---- the interpreter's lock ---- */

/* Whether the calling thread holds it: never where there is no interpreter. */
static bool holds_lock(void) {
    static int (*check)(void);
    if (check == NULL) {
        *(void **)&check = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    }
    return check != NULL && check() != 0;
}

static void note_lock(const char *function) {
    char line[NAME_BYTES + 1];
    snprintf(line, sizeof line, "%s\n", function);
    if (holds_lock() && strstr(with_lock, line) == NULL &&
        strlen(with_lock) + strlen(line) < sizeof with_lock) {
        strcat(with_lock, line);
    }
}

size_t stand_in_calls_with_lock(char *out, size_t nbytes) {
    pthread_mutex_lock(&mutex);
    size_t length = copied(with_lock, strlen(with_lock), out, nbytes);
    pthread_mutex_unlock(&mutex);
    return length;
}

/* ---- faults ---- */

/* Whether this library exports the function, possibly as its second version. */
bool stand_in_has(const char *function) {
    char versioned[NAME_BYTES + 3];
    snprintf(versioned, sizeof versioned, "%s_v2", function);
    Dl_info self;
    void *library =
        dladdr(faults, &self) != 0 ? dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
    bool found =
        library != NULL && (dlsym(library, function) != NULL || dlsym(library, versioned) != NULL);
    if (library != NULL) {
        dlclose(library);
    }
    return found && strlen(function) < NAME_BYTES;
}

/* The fault of this function, else a free place, else NULL. */
static struct fault *place_of(const char *function) {
    struct fault *place = NULL;
    for (int i = MAX_FAULTS - 1; i >= 0; i--) {
        if (strcmp(faults[i].function, function) == 0) {
            return &faults[i];
        }
        place = faults[i].code == 0 ? &faults[i] : place;
    }
    return place;
}

int stand_in_fail(const char *function, int code, int after) {
    if (!stand_in_has(function)) {
        return -1;
    }
    pthread_mutex_lock(&mutex);
    struct fault *fault = place_of(function);
    if (fault != NULL) {
        snprintf(fault->function, sizeof fault->function, "%s", function);
        fault->code = code;
        fault->calls_left = after;
        has_faults = true;
    }
    pthread_mutex_unlock(&mutex);
    return fault != NULL ? 0 : -1;
}

static int code_of(const char *function) {
    for (int i = 0; i < MAX_FAULTS && has_faults; i++) {
        if (faults[i].code != 0 && strcmp(faults[i].function, function) == 0) {
            return faults[i].calls_left-- > 0 ? 0 : (faults[i].calls_left = 0, faults[i].code);
        }
    }
    return 0;
}

int stand_in_called(const char *call, ...) {
    char function[NAME_BYTES] = "";
    va_list arguments;
    va_start(arguments, call);
    pthread_mutex_lock(&mutex);
    append(call, arguments);
    snprintf(function, sizeof function, "%.*s", (int)strcspn(call, " "), call);
    note_lock(function);
    int code = code_of(function);
    pthread_mutex_unlock(&mutex);
    va_end(arguments);
    return code;
}

int stand_in_asked(const char *function) {
    pthread_mutex_lock(&mutex);
    note_lock(function);
    int code = code_of(function);
    pthread_mutex_unlock(&mutex);
    return code;
}

void stand_in_faults_from(const char *variable) {
    const char *orders = getenv(variable);
    while (orders != NULL && *orders != '\0') {
        char function[NAME_BYTES];
        int code, length;
        if (sscanf(orders, "%63[^=,]=%d%n", function, &code, &length) != 2 ||
            stand_in_fail(function, code, 0) != 0) {
            fprintf(stderr, "%s: cannot make sense of \"%s\"\n", variable, orders);
            abort();
        }
        orders += length;
        orders += *orders == ',';
    }
}

/* ---- memory ---- */

void *stand_in_allocate(size_t nbytes, size_t alignment, int device) {
    struct allocation *allocation = malloc(sizeof *allocation);
    /* The C library wants a multiple of the alignment; at least one, so that every allocation has
     * an address of its own. */
    size_t room = (nbytes / alignment + 1) * alignment;
    void *address =
        allocation != NULL && nbytes < SIZE_MAX / 2 ? aligned_alloc(alignment, room) : NULL;
    if (address == NULL) {
        free(allocation);
        return NULL;
    }
    pthread_mutex_lock(&mutex);
    *allocation = (struct allocation){allocations, address, nbytes, device};
    allocations = allocation;
    pthread_mutex_unlock(&mutex);
    return address;
}

int stand_in_device_at(const void *address) {
    int device = -1;
    pthread_mutex_lock(&mutex);
    for (const struct allocation *one = allocations; one != NULL; one = one->next) {
        const char *start = one->address;
        bool is_in = (const char *)address >= start && (const char *)address < start + one->nbytes;
        device = is_in ? one->device : device;
    }
    pthread_mutex_unlock(&mutex);
    return device;
}

size_t stand_in_nbytes_at(const void *address) {
    pthread_mutex_lock(&mutex);
    const struct allocation *one = allocations;
    while (one != NULL && one->address != address) {
        one = one->next;
    }
    size_t nbytes = one != NULL ? one->nbytes : 0;
    pthread_mutex_unlock(&mutex);
    return nbytes;
}

bool stand_in_release(void *address) {
    pthread_mutex_lock(&mutex);
    struct allocation **link = &allocations;
    while (*link != NULL && (*link)->address != address) {
        link = &(*link)->next;
    }
    struct allocation *found = *link;
    if (found != NULL) {
        *link = found->next;
    }
    pthread_mutex_unlock(&mutex);
    if (found == NULL) {
        return false;
    }
    free(found->address);
    free(found);
    return true;
}

size_t stand_in_live_bytes(void) {
    size_t nbytes = 0;
    pthread_mutex_lock(&mutex);
    for (const struct allocation *one = allocations; one != NULL; one = one->next) {
        nbytes += one->nbytes;
    }
    pthread_mutex_unlock(&mutex);
    return nbytes;
}
