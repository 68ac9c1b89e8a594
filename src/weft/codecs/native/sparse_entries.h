/* What is done with entries that are chosen, for one type: see sparse_choose.h. */

/* target += scale * entries of several messages, in their order; of a target that `is_fresh`, whatever it holds, it is
 * the sum. Chunk by chunk, so that a chunk stays in the cache. A tensor's entries in a message that was damaged, so that
 * they belong nowhere, are left out. `cursors`: room for a number per message. */
void NAME(weft_sparse_add)(const Place *places, int64_t num_tensors, REAL *target, int64_t num_messages,
                           const int32_t **counts, const uint16_t **offsets, const REAL **rows, int64_t *cursors,
                           double scale, int is_fresh)
{
    for (const Place *place = places; place < places + num_tensors; place++) {
        int64_t num_chunks = (place->numel + CHUNK - 1) / CHUNK;
        for (int64_t message = 0; message < num_messages; message++) {
            int64_t total = 0, is_damaged = 0;
            for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
                is_damaged |= counts[message][place->first_chunk + chunk] < 0;
                total += counts[message][place->first_chunk + chunk];
            }
            cursors[message] = is_damaged || total > place->num_entries ? -1 : place->first_entry;
        }
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
            REAL *first = target + place->offset + chunk * CHUNK;
            int64_t length = place->numel - chunk * CHUNK < CHUNK ? place->numel - chunk * CHUNK : CHUNK;
            if (is_fresh)
                memset(first, 0, (size_t)length * sizeof(REAL));
            for (int64_t message = 0; message < num_messages; message++) {
                if (cursors[message] < 0)
                    continue;
                const uint16_t *offset = offsets[message] + cursors[message];
                const REAL *value = rows[message] + cursors[message];
                int64_t count = counts[message][place->first_chunk + chunk];
                for (int64_t k = 0; k < count; k++)
                    if (offset[k] < length)
                        first[offset[k]] += value[k] * (REAL)scale;
                cursors[message] += count;
            }
        }
    }
}

FOR_EVERY_CPU static void NAME(round_to_8)(REAL *row, int64_t num, int8_t *codes, REAL *scales)
{
    REAL most = 0;
    for (int64_t k = 0; k < num; k++) {
        REAL size = row[k] < 0 ? -row[k] : row[k];
        most = size > most ? size : most;
    }
    REAL scale = most / 127;
    for (int64_t k = 0; k < num; k++) {
        REAL code = row[k] / scale;
        code = code > 127 ? 127 : code < -127 ? -127 : code == code ? NAME(nearest)(code) : 0;
        codes[k] = (int8_t)code;
        row[k] -= code * scale;
    }
    scales[0] = scale;
    scales[1] = 0;
}

/* Two bits of entries `first` and so on: the size is above the mean size; the value is negative. */
static void NAME(round_to_2)(REAL *row, int64_t num, int64_t first, uint8_t *codes, REAL *scales)
{
    double total = 0, sums[2] = {0, 0};
    int64_t counts[2] = {0, 0};
    for (int64_t k = 0; k < num; k++)
        total += row[k] < 0 ? -row[k] : row[k];
    REAL mean = (REAL)(total / (double)(num ? num : 1));
    for (int64_t k = 0; k < num; k++) {
        REAL size = row[k] < 0 ? -row[k] : row[k];
        int is_upper = size > mean;
        sums[is_upper] += size;
        counts[is_upper]++;
        codes[(first + k) / 4] |= (uint8_t)((is_upper | (row[k] < 0) << 1) << (first + k) % 4 * 2);
    }
    for (int group = 0; group < 2; group++)
        scales[group] = (REAL)(sums[group] / (double)(counts[group] ? counts[group] : 1));
    for (int64_t k = 0; k < num; k++) {
        REAL size = row[k] < 0 ? -row[k] : row[k], sent = scales[size > mean];
        row[k] -= row[k] < 0 ? -sent : sent;
    }
}

/* Round the entries of all tensors to few bits; the row ends as what that took from them. The codes are zero before. */
void NAME(weft_sparse_round)(const Place *places, int64_t num_tensors, int bits, const int32_t *counts, REAL *row,
                             uint8_t *codes, REAL *scales)
{
    for (const Place *place = places; place < places + num_tensors; place++, scales += 2) {
        int64_t num = 0, first = place->first_entry;
        for (int64_t chunk = 0; chunk < (place->numel + CHUNK - 1) / CHUNK; chunk++)
            num += counts[place->first_chunk + chunk];
        if (bits == 8)
            NAME(round_to_8)(row + first, num, (int8_t *)codes + first, scales);
        else
            NAME(round_to_2)(row + first, num, first, codes, scales);
    }
}

/* The values of rounded entries. */
void NAME(weft_sparse_expand)(const Place *places, int64_t num_tensors, int bits, const uint8_t *codes,
                              const REAL *scales, REAL *row)
{
    for (const Place *place = places; place < places + num_tensors; place++, scales += 2)
        for (int64_t k = place->first_entry; k < place->first_entry + place->num_entries; k++) {
            int code = bits == 8 ? (int8_t)codes[k] : codes[k / 4] >> k % 4 * 2 & 3;
            REAL size = scales[code & 1];
            row[k] = bits == 8 ? (REAL)code * scales[0] : code & 2 ? -size : size;
        }
}
