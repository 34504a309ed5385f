/* The part of NVIDIA's management library that the package uses, on GPUs that a text file describes.
 *
 * The file that NVML_SCRIPT names is read again whenever it was replaced. A line is a key, a space and a value:
 *
 *   count 2                          two GPUs
 *   0.power 250000                   what nvmlDeviceGetPowerUsage says of the first one; without a line: not supported
 *   0.mig.1.memory.used 1024         of its second MIG slice
 *   0.error.nvmlDeviceGetName 999    a function fails with this code on one device ...
 *   error.nvmlInitWithFlags 9        ... or on all
 *   hang.nvmlDeviceGetPowerUsage 10  it takes this many seconds
 *   0.lost 1                         every question about the GPU says that it is lost
 *
 * Where NVML_FIXED is set, it is read once: to look for a new one takes as long as the rest of a call.
 * Where NVML_CALLS names a file, every call adds a line to it: thread, function, GPU (-1: none).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       TIMEOUT = 10, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25 };
enum { MOST_GPUS = 32, MOST_SLICES = 8, MOST_LINES = 4096, MOST_SAMPLES = 256 };

typedef struct { int gpu, slice; } Device;
typedef Device *Handle;
typedef struct { char key[96], value[96]; } Line;

static Device gpus[MOST_GPUS], slices[MOST_GPUS][MOST_SLICES];
static Line lines[MOST_LINES];
static int num_lines, initialised;
static struct stat seen;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int by_key(const void *a, const void *b) { return strcmp(((const Line *)a)->key, ((const Line *)b)->key); }

static void read_script(void) {
    const char *path = getenv("NVML_SCRIPT");
    struct stat now;
    if (num_lines > 0 && getenv("NVML_FIXED") != NULL) return;
    if (path == NULL || stat(path, &now) != 0) return;
    if (now.st_ino == seen.st_ino && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec && now.st_size == seen.st_size) return;
    FILE *file = fopen(path, "r");
    if (file == NULL) return;
    char text[256];
    num_lines = 0;
    while (num_lines < MOST_LINES && fgets(text, sizeof text, file) != NULL)
        if (sscanf(text, "%95s %95[^\n]", lines[num_lines].key, lines[num_lines].value) == 2) num_lines++;
    fclose(file);
    qsort(lines, num_lines, sizeof(Line), by_key);
    seen = now;
}

/* The value of a key, NULL where there is none. */
static const char *look(const char *key, char *copy) {
    Line wanted;
    snprintf(wanted.key, sizeof wanted.key, "%s", key);
    pthread_mutex_lock(&lock);
    Line *found = bsearch(&wanted, lines, num_lines, sizeof(Line), by_key);
    if (found != NULL) strcpy(copy, found->value);
    pthread_mutex_unlock(&lock);
    return found == NULL ? NULL : copy;
}

static int text_of(Handle device, const char *name, char *copy) {
    char key[128];
    if (device->slice < 0) snprintf(key, sizeof key, "%d.%s", device->gpu, name);
    else snprintf(key, sizeof key, "%d.mig.%d.%s", device->gpu, device->slice, name);
    return look(key, copy) == NULL ? NOT_SUPPORTED : OK;
}

static int number_of(Handle device, const char *name, unsigned long long *value) {
    char copy[96];
    int code = text_of(device, name, copy);
    if (code == OK) *value = strtoull(copy, NULL, 0);
    return code;
}

static long plain(const char *key, long otherwise) {
    char copy[96];
    return look(key, copy) == NULL ? otherwise : strtol(copy, NULL, 0);
}

static void note(const char *function, int gpu) {
    const char *path = getenv("NVML_CALLS");
    if (path == NULL || path[0] == 0) return;
    char line[160];
    int length = snprintf(line, sizeof line, "%ld %s %d\n", (long)syscall(SYS_gettid), function, gpu);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    if (write(file, line, length) != length) abort();
    close(file);
}

/* What every function does first: note the call, take its time, fail if it is to fail. */
static int enter(const char *function, Handle device) {
    char key[128];
    int gpu = device == NULL ? -1 : device->gpu;
    note(function, gpu);
    pthread_mutex_lock(&lock);
    read_script();
    pthread_mutex_unlock(&lock);
    snprintf(key, sizeof key, "hang.%s", function);
    double seconds = 0;
    char copy[96];
    if (look(key, copy) != NULL) seconds = strtod(copy, NULL);
    if (seconds > 0) {
        struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
        nanosleep(&left, NULL);
    }
    snprintf(key, sizeof key, "error.%s", function);
    long code = plain(key, OK);
    if (code == OK && gpu >= 0) {
        snprintf(key, sizeof key, "%d.error.%s", gpu, function);
        code = plain(key, OK);
        snprintf(key, sizeof key, "%d.lost", gpu);
        if (code == OK && plain(key, 0)) code = GPU_IS_LOST;
    }
    if (code == OK && initialised <= 0 && strncmp(function, "nvmlInit", 8) != 0) code = UNINITIALIZED;
    return (int)code;
}

#define ENTER(device) do { int code_ = enter(__func__, device); if (code_ != OK) return code_; } while (0)

static int give_text(Handle device, const char *name, char *buffer, unsigned length) {
    char copy[96];
    int code = text_of(device, name, copy);
    if (code != OK) return code;
    if (strlen(copy) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(buffer, copy);
    return OK;
}

static int give(Handle device, const char *name, unsigned *value) {
    unsigned long long found;
    int code = number_of(device, name, &found);
    if (code == OK) *value = (unsigned)found;
    return code;
}

/* --- the library ------------------------------------------------------------------------------------------------ */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ENTER(NULL);
    for (int gpu = 0; gpu < MOST_GPUS; gpu++) {
        gpus[gpu] = (Device){gpu, -1};
        for (int slice = 0; slice < MOST_SLICES; slice++) slices[gpu][slice] = (Device){gpu, slice};
    }
    initialised++;
    return OK;
}

int nvmlShutdown(void) {
    ENTER(NULL);
    initialised--;
    return OK;
}

const char *nvmlErrorString(int code) {
    return code == OK ? "Success" : "an error of the scripted library";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER(NULL);
    char copy[96];
    if (look("driver", copy) == NULL) return NOT_SUPPORTED;
    snprintf(version, length, "%s", copy);
    return OK;
}

/* --- finding devices ---------------------------------------------------------------------------------------------- */

int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(NULL);
    *count = (unsigned)plain("count", 0);
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *device) {
    ENTER(index < MOST_GPUS ? &gpus[index] : NULL);
    if (index >= MOST_GPUS || (long)index >= plain("count", 0)) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *device) {
    char copy[96];
    ENTER(NULL);
    for (int gpu = 0; gpu < plain("count", 0) && gpu < MOST_GPUS; gpu++) {
        if (text_of(&gpus[gpu], "uuid", copy) == OK && strcmp(copy, uuid) == 0) {
            ENTER(&gpus[gpu]);
            *device = &gpus[gpu];
            return OK;
        }
        for (int slice = 0; slice < MOST_SLICES; slice++)
            if (text_of(&slices[gpu][slice], "uuid", copy) == OK && strcmp(copy, uuid) == 0) {
                *device = &slices[gpu][slice];
                return OK;
            }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(Handle device, char *uuid, unsigned length) {
    ENTER(device);
    return give_text(device, "uuid", uuid, length);
}

int nvmlDeviceGetName(Handle device, char *name, unsigned length) {
    ENTER(device);
    return give_text(device, "name", name, length);
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(Handle device, PciInfo *info) {
    ENTER(device);
    memset(info, 0, sizeof *info);
    return give_text(device, "pci", info->bus_id, sizeof info->bus_id);
}

int nvmlDeviceGetCudaComputeCapability(Handle device, int *major, int *minor) {
    char copy[96];
    ENTER(device);
    if (text_of(device, "capability", copy) != OK) return NOT_SUPPORTED;
    return sscanf(copy, "%d.%d", major, minor) == 2 ? OK : INVALID_ARGUMENT;
}

/* --- MIG -------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(Handle device, unsigned *current, unsigned *pending) {
    ENTER(device);
    int code = give(device, "mig", current);
    if (code == OK) *pending = *current;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle device, unsigned *count) {
    ENTER(device);
    *count = MOST_SLICES;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle device, unsigned index, Handle *slice) {
    char copy[96];
    ENTER(device);
    if (index >= MOST_SLICES || text_of(&slices[device->gpu][index], "uuid", copy) != OK) return NOT_FOUND;
    *slice = &slices[device->gpu][index];
    return OK;
}

int nvmlDeviceGetGpuInstanceId(Handle device, unsigned *id) {
    ENTER(device);
    return give(device, "gi", id);
}

int nvmlDeviceGetComputeInstanceId(Handle device, unsigned *id) {
    ENTER(device);
    return give(device, "ci", id);
}

/* --- memory and processes --------------------------------------------------------------------------------------- */

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;

int nvmlDeviceGetMemoryInfo_v2(Handle device, MemoryV2 *memory) {
    ENTER(device);
    if (memory->version != (sizeof(MemoryV2) | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    if (number_of(device, "memory.total", &memory->total) || number_of(device, "memory.used", &memory->used))
        return NOT_SUPPORTED;
    if (number_of(device, "memory.reserved", &memory->reserved)) memory->reserved = 0;
    if (number_of(device, "memory.free", &memory->free))
        memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}

int nvmlDeviceGetMemoryInfo(Handle device, Memory *memory) {
    unsigned long long reserved = 0;
    ENTER(device);
    if (number_of(device, "memory.total", &memory->total) || number_of(device, "memory.used", &memory->used))
        return NOT_SUPPORTED;
    number_of(device, "memory.reserved", &reserved);
    memory->used += reserved;
    memory->free = memory->total - memory->used;
    return OK;
}

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} Process;

/* "processes 12:1000 self:2000": process numbers and bytes, self is the caller */
static int processes_of(Handle device, unsigned *count, Process *found) {
    char copy[96], *next, *at;
    if (text_of(device, "processes", copy) != OK) return NOT_SUPPORTED;
    unsigned number = 0, most = *count;
    for (at = strtok_r(copy, " ", &next); at != NULL; at = strtok_r(NULL, " ", &next)) {
        char *bytes = strchr(at, ':');
        if (bytes == NULL) continue;
        if (found != NULL && number < most)
            found[number] = (Process){strncmp(at, "self", 4) == 0 ? (unsigned)getpid() : (unsigned)strtoul(at, NULL, 0),
                                      strtoull(bytes + 1, NULL, 0), ~0u, ~0u};
        number++;
    }
    *count = number;
    return number > 0 && (found == NULL || number > most) ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *count, Process *found) {
    ENTER(device);
    return processes_of(device, count, found);
}

int nvmlDeviceGetComputeRunningProcesses_v2(Handle device, unsigned *count, Process *found) {
    ENTER(device);
    return processes_of(device, count, found);
}

/* --- load, clocks, heat, power ------------------------------------------------------------------------------------ */

typedef struct { unsigned gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(Handle device, Utilization *rates) {
    ENTER(device);
    return give(device, "utilization", &rates->gpu) || give(device, "memory_utilization", &rates->memory)
        ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetClockInfo(Handle device, unsigned kind, unsigned *mhz) {
    ENTER(device);
    return give(device, kind == 1 ? "clock.sm" : "clock.memory", mhz);
}

int nvmlDeviceGetMaxClockInfo(Handle device, unsigned kind, unsigned *mhz) {
    ENTER(device);
    return give(device, kind == 1 ? "clock.sm_max" : "clock.memory_max", mhz);
}

int nvmlDeviceGetCurrentClocksEventReasons(Handle device, unsigned long long *bits) {
    ENTER(device);
    return number_of(device, "reasons", bits);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Handle device, unsigned long long *bits) {
    ENTER(device);
    return number_of(device, "reasons", bits);
}

int nvmlDeviceGetPerformanceState(Handle device, unsigned *state) {
    ENTER(device);
    return give(device, "pstate", state);
}

typedef struct { unsigned version, sensor; int celsius; } Temperature;

int nvmlDeviceGetTemperatureV(Handle device, Temperature *temperature) {
    ENTER(device);
    if (temperature->version != (sizeof(Temperature) | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return give(device, "temperature", (unsigned *)&temperature->celsius);
}

int nvmlDeviceGetTemperature(Handle device, unsigned sensor, unsigned *celsius) {
    (void)sensor;
    ENTER(device);
    return give(device, "temperature", celsius);
}

int nvmlDeviceGetTemperatureThreshold(Handle device, unsigned threshold, unsigned *celsius) {
    ENTER(device);
    return threshold == 1 ? give(device, "slowdown", celsius) : NOT_SUPPORTED;
}

int nvmlDeviceGetPowerUsage(Handle device, unsigned *milliwatts) {
    ENTER(device);
    return give(device, "power", milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(Handle device, unsigned *milliwatts) {
    ENTER(device);
    return give(device, "power_limit", milliwatts);
}

int nvmlDeviceGetPowerManagementLimit(Handle device, unsigned *milliwatts) {
    ENTER(device);
    return give(device, "power_limit", milliwatts);
}

int nvmlDeviceGetTotalEnergyConsumption(Handle device, unsigned long long *millijoules) {
    ENTER(device);
    return number_of(device, "energy", millijoules);
}

/* --- links ------------------------------------------------------------------------------------------------------ */

#define PCIE(function, name) int function(Handle device, unsigned *value) { ENTER(device); return give(device, name, value); }
PCIE(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
PCIE(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.generation_max")
PCIE(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
PCIE(nvmlDeviceGetMaxPcieLinkWidth, "pcie.width_max")
PCIE(nvmlDeviceGetPcieReplayCounter, "pcie.replays")

int nvmlDeviceGetPcieThroughput(Handle device, unsigned counter, unsigned *kilobytes) {
    ENTER(device);
    return give(device, counter == 0 ? "pcie.tx" : "pcie.rx", kilobytes);
}

int nvmlDeviceGetNvLinkState(Handle device, unsigned link, unsigned *is_active) {
    char copy[96];
    ENTER(device);
    if (text_of(device, "nvlinks", copy) != OK) return NOT_SUPPORTED;
    if (link >= strlen(copy)) return INVALID_ARGUMENT; /* "1101": four links, the third is down */
    *is_active = copy[link] == '1';
    return OK;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type;
    int code;
    union { double number; unsigned small; unsigned long long big; } value;
} FieldValue;

int nvmlDeviceGetFieldValues(Handle device, int count, FieldValue *values) {
    ENTER(device);
    for (int i = 0; i < count; i++) {
        char name[32];
        unsigned long long found = 0;
        snprintf(name, sizeof name, "field.%u", values[i].field);
        values[i].code = number_of(device, name, &found);
        values[i].value.big = found;
        values[i].type = values[i].field == 82 ? 1 : 3;
    }
    return OK;
}

/* --- faults ----------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetTotalEccErrors(Handle device, unsigned kind, unsigned counter, unsigned long long *count) {
    (void)counter;
    ENTER(device);
    return number_of(device, kind == 0 ? "ecc.corrected" : "ecc.uncorrected", count);
}

int nvmlDeviceGetRemappedRows(Handle device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    char copy[96];
    ENTER(device);
    if (text_of(device, "remapped", copy) != OK) return NOT_SUPPORTED;
    return sscanf(copy, "%u %u %u %u", corrected, uncorrected, pending, failed) == 4 ? OK : INVALID_ARGUMENT;
}

typedef struct { Handle device; int given; } EventSet;
typedef struct {
    Handle device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} EventData;

int nvmlEventSetCreate(EventSet **set) {
    ENTER(NULL);
    *set = calloc(1, sizeof(EventSet));
    return OK;
}

int nvmlEventSetFree(EventSet *set) {
    ENTER(NULL);
    free(set);
    return OK;
}

int nvmlDeviceRegisterEvents(Handle device, unsigned long long types, EventSet *set) {
    char copy[96];
    ENTER(device);
    if (types != 8) return INVALID_ARGUMENT;
    if (text_of(device, "xid", copy) != OK) return NOT_SUPPORTED;
    set->device = device;
    return OK;
}

/* "xid none 31 43": two events, each given once */
int nvmlEventSetWait_v2(EventSet *set, EventData *data, unsigned milliseconds) {
    char copy[96], *next, *at;
    int number = -1;
    (void)milliseconds;
    ENTER(NULL);
    if (set->device == NULL || text_of(set->device, "xid", copy) != OK) return TIMEOUT;
    for (at = strtok_r(copy, " ", &next); at != NULL; at = strtok_r(NULL, " ", &next), number++)
        if (number == set->given) {
            set->given++;
            *data = (EventData){set->device, 8, strtoull(at, NULL, 0), ~0u, ~0u};
            return OK;
        }
    return TIMEOUT;
}

/* --- performance monitoring --------------------------------------------------------------------------------------- */

typedef struct { Handle device; int slice; } Sample;
typedef struct { unsigned version, is_supported; } Support;
typedef struct { unsigned id; int code; double value; const char *names[3]; } Metric;
typedef struct { unsigned version, count; Sample *first, *second; Metric metrics[]; } Request;

int nvmlGpmQueryDeviceSupport(Handle device, Support *support) {
    unsigned value = 0;
    ENTER(device);
    if (support->version != 1) return ARGUMENT_VERSION_MISMATCH;
    give(device, "gpm", &value);
    support->is_supported = value;
    return OK;
}

int nvmlGpmSampleAlloc(Sample **sample) {
    ENTER(NULL);
    *sample = calloc(1, sizeof(Sample));
    return OK;
}

int nvmlGpmSampleFree(Sample *sample) {
    ENTER(NULL);
    free(sample);
    return OK;
}

int nvmlGpmSampleGet(Handle device, Sample *sample) {
    ENTER(device);
    *sample = (Sample){device, -1};
    return OK;
}

int nvmlGpmMigSampleGet(Handle device, unsigned gpu_instance, Sample *sample) {
    unsigned long long id;
    ENTER(device);
    for (int slice = 0; slice < MOST_SLICES; slice++)
        if (number_of(&slices[device->gpu][slice], "gi", &id) == OK && id == gpu_instance) {
            *sample = (Sample){device, slice};
            return OK;
        }
    return INVALID_ARGUMENT;
}

int nvmlGpmMetricsGet(Request *request) {
    ENTER(NULL);
    if (request->version != 1) return ARGUMENT_VERSION_MISMATCH;
    Sample *last = request->second;
    if (last->device == NULL || request->first->device != last->device) return INVALID_ARGUMENT;
    Handle device = last->slice < 0 ? last->device : &slices[last->device->gpu][last->slice];
    for (unsigned i = 0; i < request->count; i++) {
        char name[32], copy[96];
        snprintf(name, sizeof name, "gpm.%u", request->metrics[i].id);
        request->metrics[i].code = text_of(device, name, copy);
        if (request->metrics[i].code == OK) request->metrics[i].value = strtod(copy, NULL);
    }
    return OK;
}
