package invalidation

import (
	"encoding/json"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Failure is why a run ended in error.
type Failure struct {
	Class string `json:"class"` // of the retry policy: "transient", "input", "oom", ...; "error" if empty
	Error string `json:"error"`
	Stack string `json:"stack,omitempty"` // of a panic

	meta json.RawMessage // see Run.Note
}

// failSQL moves entries $4 to penstock.failure.
const failSQL = `
WITH found AS MATERIALIZED (
    SELECT k.*, e.row
      FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::jsonb[], $6::text[], $8::bigint[])
          k(lock_key, token, id, error, fingerprint, run_ms)
     CROSS JOIN LATERAL (
           SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
     CROSS JOIN LATERAL (
           SELECT ctid AS row FROM penstock.entry_X WHERE queue_id = $1 AND id = k.id OFFSET 0) e
), gone AS (
    DELETE FROM penstock.entry_X d
     USING found f
     WHERE d.ctid = f.row
    RETURNING d::penstock.entry AS entry, d.attempt, d.history, f.error, f.fingerprint, f.run_ms
)
SELECT penstock.all_ended((SELECT count(*) FROM found), (
       SELECT count(penstock.add_failure(entry, least(attempt + 1, 32767)::smallint, coalesce(error->>'class', 'error'),
                    coalesce(error->>'error', ''), fingerprint,
                    penstock.history_add(history, penstock.run_note(attempt + 1, error, $7, run_ms))))
         FROM gone))`

func (q *Queue) addFail(batch *pgx.Batch, node NodeID, endings []Ending) {
	if c := pick(endings, is(verbFail)); len(c.ids) > 0 {
		batch.Queue(q.sql.fail, q.ID, c.keys, c.tokens, c.ids,
			each(c, func(e *Ending) Failure { return e.failure.clean() }),
			each(c, func(e *Ending) string { return Fingerprint(e.failure.clean().Error) }), node, c.ran)
	}
}

// clean makes a failure fit to be stored.
func (f Failure) clean() Failure {
	if f.Class == "" {
		f.Class = "error"
	}
	return Failure{Class: tidy(f.Class), Error: tidy(f.Error), Stack: tidy(f.Stack), meta: f.meta}
}

// MarshalJSON writes the fields of a failure that are stored.
func (f Failure) MarshalJSON() ([]byte, error) {
	type plain Failure
	return json.Marshal(struct {
		plain
		Meta json.RawMessage `json:"meta,omitempty"`
	}{plain(f), f.meta})
}

// tidy makes a text fit to be stored: valid UTF-8 without NUL, of at most 8 KiB.
func tidy(s string) string {
	const longest = 8 << 10
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "?"), "\x00", "?")
	if len(s) > longest {
		s = strings.ToValidUTF8(s[:longest], "") // the cut may have gone through a letter
	}
	return s
}

var varying = regexp.MustCompile(`"[^"]*"|'[^']*'|\b[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}\b|\b0x[0-9a-fA-F]+\b|[0-9]+`)

// Fingerprint is an error without its variable parts (numbers, quoted texts, ids), so that errors
// of one cause can be told from others and handled together.
func Fingerprint(message string) string {
	message = varying.ReplaceAllString(strings.ToValidUTF8(message, "?"), "_")
	if len(message) > 200 {
		message = strings.ToValidUTF8(message[:200], "")
	}
	return message
}
