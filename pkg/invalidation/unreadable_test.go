package invalidation

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// A row that came past the checks of a push, or whose limits grew smaller, has a text beyond the gigabyte of a value in
// Postgres: 8,300 numbers of 131,072 digits.
const unreadablePayload = `(SELECT jsonb_agg(1e131071) FROM generate_series(1, 8300))`

func TestLongARowThatCannotBeReadStopsNoOtherEntry(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushAll(b.pool, Push{}, Push{}, Push{}, Push{LockKey: "K", Flow: "f"}, Push{LockKey: "K", Flow: "f"})
	b.exec(b.pool, `UPDATE penstock.entry SET payload = `+unreadablePayload+` WHERE id = ANY ($1)`, []EntryID{ids[1], ids[3]})
	var claimed []EntryID
	for range 2 { // the first claim of a lane fails the entry
		claimed = append(claimed, entryIDs(b.claimAs(ClaimRequest{Node: here, Lane: Lane{Priority: 1}, Limit: 10}).Locks...)...)
		claimed = append(claimed, entryIDs(b.claimAs(ClaimRequest{Node: here, Lane: Lane{Priority: 1, Flow: "f"}, Limit: 10}).Locks...)...)
	}
	b.want(claimed, []EntryID{ids[0], ids[2], ids[4]})
	b.want(b.count(`SELECT count(*) FROM penstock.failure WHERE entry_id = ANY ($1) AND class = 'unreadable' AND error LIKE 'the entry cannot be read: %'`,
		[]EntryID{ids[1], ids[3]}), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 3)
	b.checkInvariants()
}

// A payload that the server cannot follow is a mistake of its pusher, who must not push it again.
func TestAPayloadBeyondTheLimitsOfTheServerIsInvalid(t *testing.T) {
	for state, want := range map[string]bool{"22P05": true, "54001": true, "53200": false} {
		if err := unstorable(&pgconn.PgError{Code: state}); errors.Is(err, ErrInvalid) != want {
			t.Errorf("%s: %v is invalid: %t, want %t", state, err, !want, want)
		}
	}
}
