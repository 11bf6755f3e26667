/* What two runs will most likely be asked for, by the text of their indexes alone: see foreseen.py.
 *
 * A plain shared library for ctypes, without state. Indexes are a stranger's: whatever is not written as our writer
 * writes it is left out, and only what lies inside of a mapped file is ever handed on.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../numerics/csrc/pair_ask.h"

#define EXPORT __attribute__((visibility("default")))

/* Bumped whenever a signature or a structure changes: the binding refuses a library it does not know. */
EXPORT int driftline_foreseen_abi(void) { return 1; }

enum { MOST_FOLDERS = 16, LONGEST_NUMBER = 18, MOST_DIGITS = 9 };
static const int64_t LONGEST_INDEX = 1 << 20; /* what has a longer one takes longer to measure than to begin with */

/* What is looked for. `asks` has one for each two types, filled in but for where and how much. */
typedef struct {
  const char *types; /* names, a zero behind each */
  const int32_t *widths;
  const PairAsk *asks;
  int32_t type_count, files; /* `files`: mapped at most */
  int64_t large, block, enough;
} Wanted;

typedef struct {
  int64_t shard, offset, length;
} Place;

/* Two tensors whose blocks follow one another from `first`. Read by foreseen.py. */
typedef struct {
  int64_t rank, process;
  Place place[2];
  int64_t count, first, type[2];
} Pair;

typedef struct {
  int32_t folder, side;
  int64_t shard, size;
  char *data;
} Mapped;

/* The beginning is read by foreseen.py. */
typedef struct {
  PairAsk *asks;
  Pair *pairs;
  int64_t ask_count, pair_count;
  Mapped *maps;
  int64_t map_count;
} Foreseen;

typedef struct {
  const char *at;
  int64_t length;
} Text;

/* A tensor that is there in full; `place` is read when it is wanted. */
typedef struct {
  Text name, shape, place;
  int64_t type, next; /* `next`: of the same slot of the table; -1 is none */
} Line;

typedef struct {
  char *content;
  Line *lines;
  int64_t count, *slots, mask;
} Index;

typedef struct {
  Pair pair;
  int32_t folder;
  int64_t order;
} Found;

typedef struct {
  Found *all;
  int64_t count, room;
} Finds;

/* The text before `mark`, which is taken off `rest` with it; whether there was one. */
static int upto(Text *rest, const char *mark, Text *before) {
  const int64_t size = (int64_t)strlen(mark);
  const char *at = memmem(rest->at, (size_t)rest->length, mark, (size_t)size);
  if (!at) return 0;
  *before = (Text){rest->at, at - rest->at};
  rest->length -= before->length + size;
  rest->at = at + size;
  return 1;
}

/* A number of digits alone, at most `most` of them; -1 if it is none. */
static int64_t number(Text text, int most) {
  int64_t value = 0;
  if (text.length < 1 || text.length > most) return -1;
  for (int64_t i = 0; i < text.length; i++) {
    if (text.at[i] < '0' || text.at[i] > '9') return -1;
    value = value * 10 + (text.at[i] - '0');
  }
  return value;
}

/* The same as it is written by a program: without zeros in front. */
static int64_t plain_number(Text text, int most) {
  return text.length > 1 && text.at[0] == '0' ? -1 : number(text, most);
}

/* Rank and process of a folder's name; whether it is one. */
static int folder_of(const char *name, int64_t *rank, int64_t *process) {
  if (strncmp(name, "rank", 4) != 0) return 0;
  Text rest = {name + 4, (int64_t)strlen(name + 4)}, before;
  *process = 0;
  if (!upto(&rest, ".p", &before)) {
    before = rest;
  } else if ((*process = plain_number(rest, MOST_DIGITS)) < 1) {
    return 0;
  }
  return (*rank = plain_number(before, MOST_DIGITS)) >= 0;
}

/* `tensors-00000.safetensors","offset":0,"length":4}`; whether it is written so. */
static int place_of(Text text, Place *place) {
  Text name, digits;
  if (text.length < 1 || text.at[text.length - 1] != '}') return 0;
  text.length--;
  if (!upto(&text, ".safetensors\",\"offset\":", &name) || !upto(&text, ",\"length\":", &digits)) return 0;
  if (name.length < 13 || memcmp(name.at, "tensors-", 8) != 0) return 0;
  name.at += 8, name.length -= 8;
  place->shard = name.length == 5 ? number(name, 5) : plain_number(name, MOST_DIGITS);
  place->offset = plain_number(digits, LONGEST_NUMBER);
  place->length = plain_number(text, LONGEST_NUMBER);
  return place->shard >= 0 && place->offset >= 0 && place->length >= 0;
}

/* Elements of a shape, `2,3`; -1 where there is something else, or too many. */
static int64_t elements(Text shape, int64_t most) {
  int64_t count = 1;
  if (!shape.length) return 1;
  for (Text size; shape.at; ) {
    if (!upto(&shape, ",", &size)) size = shape, shape.at = NULL;
    const int64_t n = number(size, LONGEST_NUMBER);
    if (n < 1 || count > most / n) return -1;
    count *= n;
  }
  return count;
}

static uint64_t hash_of(Text text) {
  uint64_t hash = 1469598103934665603u;
  for (int64_t i = 0; i < text.length; i++) hash = (hash ^ (uint8_t)text.at[i]) * 1099511628211u;
  return hash ^ hash >> 29;
}

static int same(Text one, Text other) {
  return one.length == other.length && !memcmp(one.at, other.at, (size_t)one.length);
}

static Line *line_named(const Index *index, Text name, int64_t **slot) {
  *slot = &index->slots[hash_of(name) & (uint64_t)index->mask];
  for (int64_t at = **slot; at >= 0; at = index->lines[at].next)
    if (same(index->lines[at].name, name)) return &index->lines[at];
  return NULL;
}

/* A file in a folder that is neither a link nor anything that would be waited for; -1 if it is, or is not there. */
static int open_in(int folder, const char *name, int64_t *size) {
  struct stat about;
  if (fstatat(folder, name, &about, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(about.st_mode)) return -1;
  const int file = openat(folder, name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
  if (file >= 0 && (fstat(file, &about) != 0 || !S_ISREG(about.st_mode))) {
    close(file);
    return -1;
  }
  *size = (int64_t)about.st_size;
  return file;
}

static char *read_index(int folder, int64_t *length) {
  int64_t size;
  const int file = open_in(folder, "index.jsonl", &size);
  if (file < 0) return NULL;
  char *content = size <= LONGEST_INDEX ? malloc((size_t)size + 1) : NULL;
  *length = 0;
  while (content && *length < size) {
    const ssize_t more = pread(file, content + *length, (size_t)(size - *length), *length);
    if (more <= 0) break;
    *length += more;
  }
  close(file);
  return content;
}

static void free_index(Index *index) {
  free(index->content), free(index->lines), free(index->slots);
}

static int type_named(const Wanted *wanted, Text name) {
  const char *known = wanted->types;
  for (int32_t type = 0; type < wanted->type_count; type++, known += strlen(known) + 1)
    if (same(name, (Text){known, (int64_t)strlen(known)})) return type;
  return -1;
}

/* The tensors that are there in full, by all that names them; of two of a name, the later. Whether it was read. */
static int list_lines(int folder, const Wanted *wanted, Index *index) {
  Text rest = {NULL, 0}, text, head, dtype, shape;
  *index = (Index){0};
  index->content = read_index(folder, &rest.length);
  if (!index->content) return 0;
  rest.at = index->content;
  int64_t most = 2, slots = 16;
  for (int64_t i = 0; i < rest.length; i++) most += rest.at[i] == '\n';
  while (slots < 2 * most) slots *= 2;
  index->mask = slots - 1;
  index->lines = malloc((size_t)most * sizeof *index->lines);
  index->slots = malloc((size_t)slots * sizeof *index->slots);
  if (!index->lines || !index->slots) return 0;
  memset(index->slots, 0xff, (size_t)slots * sizeof *index->slots);
  for (int more = 1; more;) {
    if (!(more = upto(&rest, "\n", &text))) text = rest;
    if (!upto(&text, ",\"dtype\":\"", &head) || !upto(&text, "\",\"shape\":[", &dtype)) continue;
    if (!upto(&text, "],\"kept\":\"full\"", &shape)) continue;
    Text place = {NULL, 0}, before;
    while (upto(&text, ",\"shard\":\"", &before)) place = text;
    /* Numbers of execution differ where one run has more than the other. */
    const char *comma = memchr(head.at, ',', (size_t)head.length);
    if (!place.at || !comma) continue;
    int64_t *slot;
    const Text name = {comma, head.at + head.length - comma};
    Line *line = line_named(index, name, &slot);
    if (!line) {
      line = &index->lines[index->count];
      *line = (Line){.name = name, .next = *slot};
      *slot = index->count++;
    }
    line->type = type_named(wanted, dtype);
    line->shape = shape;
    line->place = place;
  }
  return 1;
}

static int add(Finds *finds, const Found *found) {
  if (finds->count == finds->room) {
    const int64_t room = 2 * finds->room + 64;
    Found *all = realloc(finds->all, (size_t)room * sizeof *all);
    if (!all) return 0;
    finds->all = all;
    finds->room = room;
  }
  finds->all[finds->count++] = *found;
  return 1;
}

/* Large pairs of one name and shape in a folder of both runs; whether it could be looked at. */
static int find_pairs(const int *folders, int32_t folder, Pair pair, const Wanted *wanted, Finds *finds) {
  Index ours, theirs = {0};
  int fine = list_lines(folders[0], wanted, &ours) && list_lines(folders[1], wanted, &theirs);
  for (int64_t i = 0; fine && i < ours.count; i++) {
    int64_t *slot;
    const Line *one = &ours.lines[i], *other = line_named(&theirs, one->name, &slot);
    if (!other || one->type < 0 || other->type < 0 || !same(one->shape, other->shape)) continue;
    pair.count = elements(one->shape, wanted->enough);
    pair.type[0] = one->type, pair.type[1] = other->type;
    if (pair.count < wanted->large) continue;
    if (!place_of(one->place, &pair.place[0]) || !place_of(other->place, &pair.place[1])) continue;
    fine = add(finds, &(Found){pair, folder, finds->count});
  }
  free_index(&ours);
  free_index(&theirs);
  return fine;
}

/* Those of one place beside each other, the first of them in front. */
static int by_place(const void *one, const void *other) {
  const Found *a = one, *b = other;
  if (a->folder != b->folder) return a->folder < b->folder ? -1 : 1;
  const int differ = memcmp(a->pair.place, b->pair.place, sizeof a->pair.place);
  return differ ? differ : (a->order > b->order) - (a->order < b->order);
}

/* The largest first; of one size, as they were found. */
static int by_size(const void *one, const void *other) {
  const Found *a = one, *b = other;
  if (a->pair.count != b->pair.count) return a->pair.count > b->pair.count ? -1 : 1;
  return (a->order > b->order) - (a->order < b->order);
}

/* What two names share is measured once. */
static void sort_finds(Finds *finds) {
  int64_t kept = 0;
  if (!finds->count) return;
  qsort(finds->all, (size_t)finds->count, sizeof *finds->all, by_place);
  for (int64_t i = 1; i < finds->count; i++) {
    Found earlier = finds->all[kept];
    earlier.order = finds->all[i].order;
    if (by_place(&earlier, &finds->all[i])) finds->all[++kept] = finds->all[i];
  }
  finds->count = kept + 1;
  qsort(finds->all, (size_t)finds->count, sizeof *finds->all, by_size);
}

/* Where a side of a pair lies; NULL if there is no such place. */
static const char *address(Foreseen *foreseen, const Found *found, int32_t side, int folder, const Wanted *wanted) {
  const int64_t shard = found->pair.place[side].shard, offset = found->pair.place[side].offset;
  Mapped *map = foreseen->maps, *end = map + foreseen->map_count;
  while (map < end && (map->folder != found->folder || map->side != side || map->shard != shard)) map++;
  if (map == end) {
    char name[64];
    int64_t size, digits = shard, at = 8 + 5;
    if (foreseen->map_count == wanted->files) return NULL;
    for (int64_t rest = shard / 100000; rest; rest /= 10) at++;
    memcpy(name, "tensors-", 8);
    strcpy(name + at, ".safetensors");
    for (int64_t i = at; i-- > 8; digits /= 10) name[i] = (char)('0' + digits % 10);
    const int file = open_in(folder, name, &size);
    if (file < 0) return NULL;
    char *data = size > 0 ? mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (data == MAP_FAILED) return NULL;
    *map = (Mapped){found->folder, side, shard, size, data};
    foreseen->map_count++;
  }
  return offset <= map->size && found->pair.place[side].length <= map->size - offset ? map->data + offset : NULL;
}

/* Blocks of one pair; 0 if it cannot lie where it is said to. */
static int add_blocks(Foreseen *foreseen, const Found *found, const int *folders, const Wanted *wanted) {
  const char *data[2];
  const Pair *pair = &found->pair;
  const int64_t count = pair->count, block = count <= 2 * wanted->block ? count : wanted->block;
  for (int32_t side = 0; side < 2; side++) {
    data[side] = address(foreseen, found, side, folders[side], wanted);
    if (!data[side] || pair->place[side].length != count * wanted->widths[pair->type[side]]) return 0;
  }
  foreseen->pairs[foreseen->pair_count] = *pair;
  foreseen->pairs[foreseen->pair_count++].first = foreseen->ask_count;
  for (int64_t start = 0; start < count; start += block) {
    PairAsk *ask = &foreseen->asks[foreseen->ask_count++];
    *ask = wanted->asks[pair->type[0] * wanted->type_count + pair->type[1]];
    ask->count = count - start < block ? count - start : block;
    for (int side = 0; side < 2; side++) ask->data[side] = data[side] + start * wanted->widths[pair->type[side]];
  }
  return 1;
}

EXPORT void driftline_forget_foreseen(void *given) {
  Foreseen *foreseen = given;
  for (int64_t i = 0; i < foreseen->map_count; i++) munmap(foreseen->maps[i].data, (size_t)foreseen->maps[i].size);
  free(foreseen->asks), free(foreseen->pairs), free(foreseen->maps), free(foreseen);
}

static Foreseen *foresee(const Finds *finds, const int (*folders)[2], const Wanted *wanted) {
  Foreseen *foreseen = calloc(1, sizeof *foreseen);
  if (!foreseen) return NULL;
  int64_t left = wanted->enough, blocks = 0, pairs = 0;
  while (pairs < finds->count && (left -= finds->all[pairs].pair.count) >= 0)
    blocks += finds->all[pairs++].pair.count / wanted->block + 1;
  foreseen->asks = malloc((size_t)(blocks + 1) * sizeof *foreseen->asks);
  foreseen->pairs = malloc((size_t)(pairs + 1) * sizeof *foreseen->pairs);
  foreseen->maps = malloc((size_t)(wanted->files + 1) * sizeof *foreseen->maps);
  int fine = foreseen->asks && foreseen->pairs && foreseen->maps;
  for (int64_t i = 0; fine && i < pairs; i++)
    fine = add_blocks(foreseen, &finds->all[i], folders[finds->all[i].folder], wanted);
  if (fine && foreseen->ask_count) return foreseen;
  driftline_forget_foreseen(foreseen);
  return NULL;
}

static int by_name(const void *one, const void *other) {
  return strcmp(one, other);
}

/* Names of the folders of processes in a run, sorted; -1 where there are too many, or none can be listed. */
static int list_folders(const char *run, char names[][32]) {
  int count = 0;
  int64_t rank, process;
  DIR *listed = opendir(run);
  if (!listed) return -1;
  for (struct dirent *entry; count >= 0 && (entry = readdir(listed));) {
    if (!folder_of(entry->d_name, &rank, &process)) continue;
    if (count == MOST_FOLDERS) {
      count = -1;
    } else {
      strcpy(names[count++], entry->d_name); /* at most two numbers of MOST_DIGITS */
    }
  }
  closedir(listed);
  if (count > 0) qsort(names, (size_t)count, sizeof names[0], by_name);
  return count;
}

/* What two runs have in common, mapped, or NULL if there is nothing, or something out of the ordinary. Nothing is said
 * of what is wrong: whoever opens them will. To be given to driftline_forget_foreseen. */
EXPORT void *driftline_foresee(const char *reference, const char *candidate, const char *types, const int32_t *widths,
                               const PairAsk *asks, int type_count, int files, int64_t large, int64_t block,
                               int64_t enough) {
  const Wanted sought = {types, widths, asks, type_count, files, large, block, enough}, *wanted = &sought;
  char names[MOST_FOLDERS][32];
  int folders[MOST_FOLDERS][2], opened = 0;
  Finds finds = {0};
  Foreseen *foreseen = NULL;
  const int count = list_folders(reference, names);
  const int runs[2] = {open(reference, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
                       open(candidate, O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  int fine = runs[0] >= 0 && runs[1] >= 0;
  for (int i = 0; fine && i < count; i++) {
    Pair pair = {0};
    folder_of(names[i], &pair.rank, &pair.process);
    for (int side = 0; side < 2; side++)
      folders[i][side] = openat(runs[side], names[i], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    opened++;
    fine = folders[i][0] >= 0 && folders[i][1] >= 0 && find_pairs(folders[i], i, pair, wanted, &finds);
  }
  if (fine) {
    sort_finds(&finds);
    foreseen = foresee(&finds, (const int(*)[2])folders, wanted);
  }
  for (int i = 0; i < opened; i++)
    for (int side = 0; side < 2; side++)
      if (folders[i][side] >= 0) close(folders[i][side]);
  for (int side = 0; side < 2; side++)
    if (runs[side] >= 0) close(runs[side]);
  free(finds.all);
  return foreseen;
}
