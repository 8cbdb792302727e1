package pgproxy

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"strings"
)

// Kind is the purpose of a transaction, told from the texts of its statements.
type Kind string

// The kinds that faults are counted by. Other is everything else: reads, samples, usage, retention.
const (
	Push    Kind = "push"
	Claim   Kind = "claim"
	Finish  Kind = "finish"
	Recover Kind = "recover"
	Cron    Kind = "cron"
	Renew   Kind = "renew" // of the term of the elected leader, and its resignation
	Beat    Kind = "beat"
	Elect   Kind = "elect"
	Promote Kind = "promote" // of due entries
	Expire  Kind = "expire"  // also requested cancels of entries that came back
	Batch   Kind = "batch"   // steps of batches by the leader
	Other   Kind = "other"
)

// Kinds are those at which faults aim, in the order of reports.
var Kinds = []Kind{Push, Claim, Finish, Recover, Cron, Renew, Beat, Elect, Promote, Expire, Batch}

// Frequent are those of them of which a run loses as many answers as it is asked for.
var Frequent = Kinds[:7]

// signs maps texts of statements to kinds. The first match counts: a recovery also ends locks, as a
// finish does, and a finish may push a callback.
var signs = []struct {
	kind Kind
	text *regexp.Regexp
}{
	{Recover, regexp.MustCompile(`(?s)FROM penstock\.lock l\s.*FOR UPDATE OF l SKIP LOCKED`)},
	{Cron, regexp.MustCompile(`penstock\.fire_cron_jobs\(`)},
	{Claim, regexp.MustCompile(`INSERT INTO penstock\.lock \(`)},
	{Finish, regexp.MustCompile(`penstock\.all_ended\(|DELETE FROM penstock\.lock\b`)},
	{Elect, regexp.MustCompile(`nextval\('penstock\.term_seq'\)`)},
	{Renew, regexp.MustCompile(`UPDATE penstock\.leader\b`)},
	{Beat, regexp.MustCompile(`UPDATE penstock\.node\s+SET beat_at`)},
	{Promote, regexp.MustCompile(`(?s)WITH due AS MATERIALIZED \(.*penstock\.requeue_throttled\(`)},
	{Expire, regexp.MustCompile(`penstock\.(expire_entries|settle_cancel_requests)\(`)},
	{Batch, regexp.MustCompile(`penstock\.(step|split)_batch\(`)},
	{Push, regexp.MustCompile(`penstock\.push(_many|_json)?\(|INSERT INTO penstock\.entry_`)},
}

// telling matches the statements of recoveries and finishes that answer with a row for each lock that the transaction
// ends or may end. The rows of their other statements do not tell that: a recovery reads its term, and a finish counts
// what it ended.
var telling = regexp.MustCompile(`(?s)FROM penstock\.lock l\s.*FOR UPDATE OF l SKIP LOCKED|` +
	`penstock\.need_read_committed\(|SELECT token FROM freed\b`)

// Sign is a kind of transactions and the regular expression that the text of one of its statements matches. The
// first sign that matches counts.
type Sign struct {
	Kind Kind
	Text string
}

// Signs returns how kinds are told apart, for failpoints within the programs.
func Signs() []Sign {
	list := make([]Sign, len(signs))
	for i, s := range signs {
		list[i] = Sign{s.kind, s.text.String()}
	}
	return list
}

var tableOfQueue = regexp.MustCompile(`"?entry_[a-z0-9_]+"?`)

// siteOf names the place in the product's code that a statement comes from. The texts of the product
// are constants but for the table of a queue.
func siteOf(sql string) string {
	text := strings.Join(strings.Fields(tableOfQueue.ReplaceAllString(sql, "entry_X")), " ")
	hash := fnv.New32a()
	hash.Write([]byte(text))
	return fmt.Sprintf("%.50s #%08x", text, hash.Sum32())
}

// rank orders kinds within a transaction: the smaller one names it.
func rank(k Kind) int {
	for i := range signs {
		if signs[i].kind == k {
			return i
		}
	}
	return len(signs)
}

// kindOf returns the kind of one statement.
func kindOf(sql string) Kind {
	for i := range signs {
		if signs[i].text.MatchString(sql) {
			return signs[i].kind
		}
	}
	return Other
}

// stronger returns the kind of a transaction with statements of both kinds.
func stronger(a, b Kind) Kind {
	if rank(b) < rank(a) {
		return b
	}
	return a
}

// effect is what the answers to statements show of what they changed.
type effect struct {
	rows    int  // that the server sent
	updated int  // rows of UPDATE, INSERT and DELETE, or of the first column being a boolean true: see Elect
	tells   bool // the rows of a statement tell of locks: see telling
	locks   int  // these rows
}

func (e *effect) add(o effect) {
	e.rows, e.updated = e.rows+o.rows, e.updated+o.updated
	e.tells, e.locks = e.tells || o.tells, e.locks+o.locks
}

// changes says that a committed transaction of the kind has changed something, as far as the answer
// shows it. A claim answers one row for the lanes and one for each lock or entry; a recovery and a
// poll of an election may find nothing, and a finish that is settled again finds no lock. Duties of the leader answer
// with how many entries they changed. A push that is repeated under its idempotency key counts as one that changes
// something: its answer does not tell.
func (k Kind) changes(e effect) bool {
	switch k {
	case Claim:
		return e.rows > 1
	case Recover:
		return e.locks > 0
	case Finish:
		return !e.tells || e.locks > 0
	case Renew, Elect, Promote, Expire, Batch:
		return e.updated > 0
	default:
		return true
	}
}

// counts says that the statements of a kind answer with the number of entries that they changed.
func (k Kind) counts() bool { return k == Promote || k == Expire || k == Batch }
