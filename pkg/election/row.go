package election

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// row is an election's row in the database.
type row struct {
	db          postgres.DB
	name        string
	holder      string
	incarnation int64
	lease       time.Duration
}

// seen is the result of one poll.
type seen struct {
	term    Term
	won     bool   // by this poll
	holder  string // of the term
	held    bool   // the term is held now
	changes int64
}

const openSQL = `
INSERT INTO penstock.leader (name) VALUES ($1) ON CONFLICT DO NOTHING`

// takeSQL takes a new term of election $1 if $5 is true and the row is free: no process was elected
// yet, the holder resigned, the lease lapsed, or the holder is this incarnation ($2), which does
// not know of it because an answer was lost. A row that is locked by a duty of the old term or
// another follower is skipped until the next poll.
const takeSQL = `
WITH free AS MATERIALIZED (
    SELECT name
      FROM penstock.leader
     WHERE name = $1 AND $5::boolean
       AND (renewed_at IS NULL OR incarnation = $2 OR renewed_at + lease <= clock_timestamp()
            OR renewed_at > clock_timestamp() + lease)
       FOR UPDATE SKIP LOCKED
), won AS (
    UPDATE penstock.leader l
       SET term = nextval('penstock.term_seq'), incarnation = $2, holder = $3, lease = $4, changes = changes + 1,
           elected_at = clock_timestamp(), renewed_at = clock_timestamp()
      FROM free
     WHERE l.name = free.name
    RETURNING l.term, l.holder, l.changes
)
SELECT coalesce(won.term, l.term), won.term IS NOT NULL, coalesce(won.holder, l.holder),
       won.term IS NOT NULL OR coalesce(l.renewed_at + l.lease > clock_timestamp(), false),
       coalesce(won.changes, l.changes)
  FROM penstock.leader l
  LEFT JOIN won ON true
 WHERE l.name = $1`

// poll reads the row and, if take is true, takes it if it is free.
func (r row) poll(ctx context.Context, take bool) (seen, error) {
	var s seen
	err := r.db.QueryRow(ctx, takeSQL, r.name, r.incarnation, r.holder, r.lease, take).
		Scan(&s.term, &s.won, &s.holder, &s.held, &s.changes)
	if errors.Is(err, pgx.ErrNoRows) {
		_, err = r.db.Exec(ctx, openSQL, r.name) // the first poll of this election; the next one may win
	}
	return s, err
}

// renewSQL extends a term that has not lapsed. A lapsed term is over, even if no other process took
// the lease.
const renewSQL = `
UPDATE penstock.leader
   SET renewed_at = clock_timestamp()
 WHERE term = $1 AND renewed_at + lease > clock_timestamp()`

// renew reports whether the term goes on.
func (r row) renew(ctx context.Context, term Term) (bool, error) {
	tag, err := r.db.Exec(ctx, renewSQL, term)
	return tag.RowsAffected() == 1, err
}

const resignSQL = `
UPDATE penstock.leader
   SET renewed_at = NULL
 WHERE term = $1`

// resign frees the row, if the term is still the newest.
func (r row) resign(ctx context.Context, term Term) error {
	_, err := r.db.Exec(ctx, resignSQL, term)
	return err
}
