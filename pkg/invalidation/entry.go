package invalidation

import (
	"cmp"
	"encoding/json"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// EntryID numbers entries over all queues, in the order in which they were accepted.
type EntryID int64

// NodeID is the incarnation of a process: random at each start, never zero.
type NodeID int64

// Token is a fencing token. It grows with every lock of a key; each write about a running entry names it.
type Token int64

// Entry is one unit of work as a claim hands it out.
type Entry struct {
	ID      EntryID
	Payload json.RawMessage
	Name    string
	Attempt int // attempts that ended in an error so far
	Crashes int // times a node died while it ran this entry
	// MayHaveRun reports that an earlier lock of the entry was ended by recovery or by an operator, and not by its
	// node: a run may have begun under it, and its end is unknown. It is never taken back, unlike a crash.
	MayHaveRun bool

	Cost     float64
	Trace    string
	Callback json.RawMessage
	// Waited is how long it had been accepted at Lock.ClaimedAt, by the database's clock; below 0 for an entry of a
	// group that came after that.
	Waited time.Duration
	// StartBy and FinishBy are start_by and finish_by on this process's monotonic clock; zero: none. They are never
	// earlier than by the database's clock, and later by as long as the answer to the claim was on its way.
	StartBy, FinishBy time.Time

	tid pgtype.TID // of its row, if the claim returned it
}

// Lock is a lock record that a claim took, with the entries it covers, oldest first.
type Lock struct {
	Key       string // the lock key; "#" and the id for a solo entry
	Token     Token
	Lane      Lane
	Entries   []Entry
	ClaimedAt time.Time // on this process's monotonic clock, from before the claim was sent
	// Requeued is set by Settle when it ended the lock and the key has more entries, or its solo entry was handed back:
	// the lane and position of its ready row.
	Requeued *LaneHead

	delay      time.Duration               // the longest delay of an entry that was released
	handedBack bool                        // an entry was released
	counted    int                         // entries of a group that the claim covered, and charged to token buckets
	paid       map[EntryID]bool            // of a group under a rate: entries that began, or were refunded alone
	quantum    int                         // entries of a group that the claim let it cover at most
	position   int64                       // of the ready row that it was claimed by
	tid        pgtype.TID                  // of a solo entry's lock record, if the claim returned it: see finishSoloSQL
	notes      map[EntryID]json.RawMessage // see Run.Note
}

// Compare orders locks by the positions that they were claimed from.
func (l *Lock) Compare(other *Lock) int { return cmp.Compare(l.position, other.position) }

// tidOf is the tid of one of the entries, not valid if the claim did not return it.
func (l *Lock) tidOf(id EntryID) (tid pgtype.TID) {
	for i := range l.Entries {
		if l.Entries[i].ID == id {
			tid = l.Entries[i].tid
		}
	}
	return tid
}

// left is called when a transaction of the handler has ended one of the entries. Where it commits, the row is gone when
// the lock is settled: a statement that went to its tid would be taken back.
func (l *Lock) left(id EntryID) {
	for i := range l.Entries {
		if l.Entries[i].ID == id {
			l.Entries[i].tid = pgtype.TID{}
		}
	}
}

// attempt is how many attempts of one of the entries had been spent at the claim, nil if the lock does not cover it.
func (l *Lock) attempt(id EntryID) *int {
	for i := range l.Entries {
		if l.Entries[i].ID == id {
			return &l.Entries[i].Attempt
		}
	}
	return nil
}

// hasStartBy says that a start_by bound one of the entries at the claim.
func (l *Lock) hasStartBy(id EntryID) bool {
	return slices.ContainsFunc(l.Entries, func(e Entry) bool { return e.ID == id && !e.StartBy.IsZero() })
}

// callback is the address and options for the report of an entry's outcome, nil for none.
func (l *Lock) callback(id EntryID) json.RawMessage {
	for i := range l.Entries {
		if l.Entries[i].ID == id {
			return l.Entries[i].Callback
		}
	}
	return nil
}

// Solo reports whether the lock covers one entry that was pushed without a lock key.
func (l *Lock) Solo() bool { return l.Key != "" && l.Key[0] == '#' }

// soloKey is the lock key of an entry that has none.
func soloKey(id EntryID) string { return "#" + strconv.FormatInt(int64(id), 10) }
