package openaibatch

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// chunkBytes is how many bytes of a file are in one row.
const chunkBytes = 256 << 10

// fileRow is a file as the table has it.
type fileRow struct {
	ID       string
	Filename string
	Purpose  string
	Bytes    int64
	Created  time.Time
	Expires  *time.Time
}

// errNoFile says that a file does not exist, is not complete, or belongs to another client.
var errNoFile = errors.New("no such file")

// newID returns an unguessable id.
func newID(prefix string) string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails
	return prefix + hex.EncodeToString(b[:])
}

const createFileSQL = `INSERT INTO penstock.gateway_file (id, owner, filename, purpose) VALUES ($1, $2, $3, $4)`

func createFile(ctx context.Context, db postgres.DB, owner, filename, purpose string) (id string, err error) {
	id = newID("file-")
	if _, err := db.Exec(ctx, createFileSQL, id, owner, filename, purpose); err != nil {
		return "", fmt.Errorf("create file: %w", err)
	}
	return id, nil
}

// appendSQL adds a chunk behind those that a file has.
const appendSQL = `
WITH f AS (
    UPDATE penstock.gateway_file SET chunks = chunks + 1, bytes = bytes + octet_length($2::bytea)
     WHERE id = $1 AND completed_at IS NULL
    RETURNING id, chunks
)
INSERT INTO penstock.gateway_file_chunk (file_id, no, data) SELECT f.id, f.chunks, $2::bytea FROM f`

// appendFile adds bytes to a file that is not complete, in chunks of at most chunkBytes.
func appendFile(ctx context.Context, db postgres.DB, id string, data []byte) error {
	for chunk := range slices.Chunk(data, chunkBytes) {
		tag, err := db.Exec(ctx, appendSQL, id, chunk)
		if err == nil && tag.RowsAffected() == 0 {
			err = errNoFile
		}
		if err != nil {
			return fmt.Errorf("append to file %s: %w", id, err)
		}
	}
	return nil
}

const completeSQL = `
UPDATE penstock.gateway_file
   SET completed_at = clock_timestamp(), purpose = $2, filename = $3, expires_at = clock_timestamp() + $4::interval
 WHERE id = $1
RETURNING id, filename, purpose, bytes, created_at, expires_at`

// completeFile makes a file visible. kept is how long; 0: until it is deleted.
func completeFile(ctx context.Context, db postgres.DB, id, purpose, filename string, kept time.Duration) (
	fileRow, error,
) {
	return oneFile(postgres.Query(ctx, db, completeSQL, id, purpose, filename, postgres.Given(kept)))
}

const dropFileSQL = `DELETE FROM penstock.gateway_file WHERE id = $1`

// dropFile removes a file with its chunks.
func dropFile(ctx context.Context, db postgres.DB, id string) error {
	if _, err := db.Exec(ctx, dropFileSQL, id); err != nil {
		return fmt.Errorf("drop file %s: %w", id, err)
	}
	return nil
}

const fileSQL = `
SELECT id, filename, purpose, bytes, created_at, expires_at
  FROM penstock.gateway_file
 WHERE id = $1 AND owner = $2 AND completed_at IS NOT NULL AND deleted_at IS NULL
   AND (expires_at IS NULL OR expires_at > clock_timestamp())`

// findFile returns a complete file of an owner, errNoFile if there is none.
func findFile(ctx context.Context, db postgres.DB, owner, id string) (fileRow, error) {
	return oneFile(postgres.Query(ctx, db, fileSQL, id, owner))
}

func oneFile(rows pgx.Rows) (fileRow, error) {
	return postgres.One[fileRow](rows, "read file", errNoFile)
}

const filesSQL = `
SELECT f.id, f.filename, f.purpose, f.bytes, f.created_at, f.expires_at
  FROM penstock.gateway_file f
  LEFT JOIN penstock.gateway_file a ON a.id = $3 AND a.owner = $1
 WHERE f.owner = $1 AND f.completed_at IS NOT NULL AND f.deleted_at IS NULL
   AND (f.expires_at IS NULL OR f.expires_at > clock_timestamp()) AND ($2 = '' OR f.purpose = $2)
   AND ($3 = '' OR CASE WHEN $4 THEN (f.created_at, f.id) < (a.created_at, a.id)
                        ELSE (f.created_at, f.id) > (a.created_at, a.id) END)
 ORDER BY CASE WHEN $4 THEN f.created_at END DESC, CASE WHEN $4 THEN f.id END DESC, f.created_at, f.id
 LIMIT $5`

// fileThereSQL says whether file $2 of owner $1 is there; for a minute after its deletion it is.
const fileThereSQL = `SELECT EXISTS (SELECT FROM penstock.gateway_file WHERE id = $2 AND owner = $1)`

// listFiles returns up to limit files of an owner behind the one with the id after, newest first if newest is set.
// Where that one is gone, the error is for the client.
func listFiles(ctx context.Context, db postgres.DB, owner, purpose, after string, newest bool, limit int) (
	[]fileRow, error,
) {
	rows := postgres.Query(ctx, db, filesSQL, owner, purpose, after, newest, limit)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[fileRow])
	if err != nil {
		return nil, fmt.Errorf("list files: %w", err)
	}
	if len(list) == 0 {
		return nil, checkAfter(ctx, db, fileThereSQL, owner, after)
	}
	return list, nil
}

// hideFileSQL hides a file. Its chunks stay as long as an open batch reads them: sweepFilesSQL removes them.
const hideFileSQL = `
UPDATE penstock.gateway_file SET deleted_at = clock_timestamp()
 WHERE id = $1 AND owner = $2 AND completed_at IS NOT NULL AND deleted_at IS NULL`

func hideFile(ctx context.Context, db postgres.DB, owner, id string) error {
	tag, err := db.Exec(ctx, hideFileSQL, id, owner)
	switch {
	case err != nil:
		return fmt.Errorf("delete file %s: %w", id, err)
	case tag.RowsAffected() == 0:
		return errNoFile
	}
	return nil
}

const chunkSQL = `SELECT data FROM penstock.gateway_file_chunk WHERE file_id = $1 AND no = $2`

// fileReader reads a file from its first byte, one chunk in memory at a time. It is an io.Reader.
type fileReader struct {
	ctx  context.Context //nolint:containedctx // an io.Reader has no other way to get it
	db   postgres.DB
	id   string
	no   int
	left int64 // bytes that were not read
	rest []byte
}

// openFile returns a reader of a file of so many bytes.
func openFile(ctx context.Context, db postgres.DB, id string, bytes int64) *fileReader {
	return &fileReader{ctx: ctx, db: db, id: id, left: bytes}
}

// next returns the next chunk, io.EOF behind the last. A file that was removed meanwhile ends with errNoFile, so that a
// part of it is not taken for the whole.
func (r *fileReader) next() ([]byte, error) {
	if r.left <= 0 {
		return nil, io.EOF
	}
	r.no++
	var data []byte
	err := r.db.QueryRow(r.ctx, chunkSQL, r.id, r.no).Scan(&data)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, fmt.Errorf("read chunk %d of file %s: %w", r.no, r.id, errNoFile)
	case err != nil:
		return nil, fmt.Errorf("read chunk %d of file %s: %w", r.no, r.id, err)
	}
	r.left -= int64(len(data))
	return data, nil
}

// Read implements io.Reader.
func (r *fileReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		data, err := r.next()
		if err != nil {
			return 0, err
		}
		r.rest = data
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// rangeSQL reads the chunks that hold the bytes from $2 up to $3 of a file whose chunks were written by an upload:
// all but the last have $4 bytes.
const rangeSQL = `
SELECT no, data FROM penstock.gateway_file_chunk
 WHERE file_id = $1 AND no BETWEEN $2::bigint / $4 + 1 AND ($3::bigint - 1) / $4 + 1
 ORDER BY no`

// readRange returns the bytes of an uploaded file from one offset up to another.
func readRange(ctx context.Context, db postgres.DB, id string, from, to int64) ([]byte, error) {
	data := make([]byte, 0, to-from)
	var no int
	var chunk []byte
	rows := postgres.Query(ctx, db, rangeSQL, id, from, to, chunkBytes)
	_, err := pgx.ForEachRow(rows, []any{&no, &chunk}, func() error {
		begin := int64(no-1) * chunkBytes
		first := max(from-begin, 0)
		last := min(to-begin, int64(len(chunk)))
		data = append(data, chunk[min(first, last):last]...)
		return nil
	})
	if err == nil && int64(len(data)) != to-from {
		err = errNoFile
	}
	if err != nil {
		return nil, fmt.Errorf("read bytes %d to %d of file %s: %w", from, to, id, err)
	}
	return data, nil
}
