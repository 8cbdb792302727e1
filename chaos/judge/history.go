// Package judge decides whether a run of the fault harness kept the promises of the queue. It
// imports nothing of the product: it knows only the records of three independent recorders, and the
// promises as docs/guarantees.md states them.
//
//   - Clients record what they asked for and what they were told.
//   - Workers record each call with its token and time.
//   - The database records grants (new lock records), insertions and ends of entries by triggers,
//     in the transactions that made them: what was rolled back left no record.
//
// A proxy before the database adds which node's heartbeats were committed when. All times but those
// of database events are of the harness's own clock; database events are ordered by their sequence
// number.
package judge

import (
	"cmp"
	"slices"
	"time"
)

// History is everything that was recorded in one run.
type History struct {
	Lease time.Duration // of task nodes
	// Tolerance is for what the harness sees late: the end of a connection, say.
	Tolerance time.Duration
	RetryBase time.Duration // the shortest wait after an error; 0: not judged
	RunMax    time.Duration // for which a node waits for the answer of a worker

	Pushes     []Push
	Calls      []Call
	Grants     []Grant
	Insertions []Insertion
	Endings    []Ending
	Setbacks   []Setback
	Changes    []Change
	Waiting    []string // queues whose entries may wait beyond a run: those of schedules and webhooks
	Places     []Place
	Beats      []Beat
	Deaths     []Death
	Stops      []Death // by SIGSTOP: those of Deaths, and those for less than half a lease
	Hindrances []Death // drains of processes, and errors that make them leave endings to recovery
	Away       []Death // times for which a process was kept from the database, and faults at its heartbeats
	Samples    []Sample
	Firings    []Firing
	Ticks      map[Tick]int // executions of entries of schedules
	Ticking    string       // their queue
	Deliveries []Delivery
	Callbacks  map[int64]int64 // the entry that delivers the report of an end, by the entry that ended

	CallbackCrashes int // after which the entry of a callback is given up

	CallbackWaits []time.Duration // after the first refusals of a callback, at most
	Quiet         time.Time       // since when nothing else was left to do
	Received      time.Time       // until when deliveries were recorded

	Told       []Told
	Effects    map[int64]int // executions by operation, of statements that the database ran
	Batches    []Batch
	Items      map[Item]int // executions of items of batches
	BatchParts []BatchPart
	Rows       map[int64]bool // operations whose own transaction committed another row with the push

	Requests     []Request // to gateways
	SlotCalls    []Call    // of all workers, also those for requests
	Slots        map[string]int
	Gateways     int
	GatewayLease time.Duration
	Unserved     []string // gateways that served no request after the faults

	Disturbances []Disturbance
	Refusals     []Disturbance // what costs leaders a pass of a duty: errors, and times in which Postgres is slow
	LeaderErrors []Disturbance // errors at any statement of a leader, with the pause after them
	Terms        []Term        // elections, renewals and resignations in the order of their sequence numbers

	Served   []string       // queues whose entries workers run
	Jobs     []string       // schedules
	Lanes    []string       // queues whose solo entries are of one priority and one flow
	LocksMax map[string]int // how many locks a queue may have at once
	Rates    map[string]Rate

	// Forked is when two primaries took writes of which only those of one were kept: what was told
	// between these times may be lost. Both are zero where the standby was synchronous or none was promoted.
	Forked [2]time.Time
	// Unhinted are entries that were pushed when all was quiet and no notification was delivered.
	Unhinted []Unhinted

	FreedOneByOne bool // recovery frees each lock in a transaction of its own

	ClockJumped bool // the server's: the times of grants, endings and places are not the harness's

	CronStep   time.Duration // between nominal times of each job
	CatchUpMax int           // of them, the latest ones, that a job is late with at most: those before are dropped
	CronUntil  time.Time     // when the schedules were paused, by the server's clock; zero: it jumped
	Unfinished []string      // entries, locks and batches that are left after the drain
	Drained    time.Duration // from the end of the faults until nothing was left
	Last       string        // what ended last
	Released   time.Duration // until locks were free that were held at the end; 0 where recovery frees them together
	FaultsOver time.Time     // when the faults had ended, and clients had their answers
	Doubts     []Doubt       // of slots, in the order in which they began
	Doubtful   []string      // slots that no call can use after the drain, and those that are held for none
	DoubtMax   time.Duration // that a slot may be in doubt
	DrainMax   time.Duration // that this may take, whatever it takes without faults
	FaultFree  time.Duration // that the same backlog took afterwards, without faults; 0: not measured
	Tables     []Table
	Deadlocks  []string // lines in the logs of the programs
	Broken     []string // violations that the product's own check of its tables reports
}

// Push is one operation of a client.
type Push struct {
	Op                int64 // names the operation in the payload
	Queue, Key        string
	Called, Returned  time.Time
	Told              bool  // accepted, as Entry
	Refused           bool  // told for certain that nothing was accepted
	Entry             int64 // 0: not told
	Due               time.Time
	StartBy, FinishBy time.Time // zero: none
	Callback, Effect  bool
	Joint             bool   // pushed in a transaction that also wrote a row of the client's own
	Once              bool   // must not run twice, also where it is unknown whether it ran
	Unique            string // unique key, empty: none
	WhileActive       bool   // the key is that of one entry until this ends
	Cancel            *Cancel
	// CrashMax and FailMax: the entry may end as failed after so many crashes or errors. 0: it may
	// not.
	FailMax  int
	CrashMax int
}

// Cancel is a client's wish to cancel an entry.
type Cancel struct {
	Called, Returned time.Time
	Cancelled        bool // told that the entry is cancelled, and not only that it will be
	Requested        bool // told that it will be
}

// Call is one call of a worker.
type Call struct {
	Entry, Token, Op int64
	Queue            string
	Begin, Closed    time.Time // until the answer, or the end of the connection
	Answer           string    // ok, error, busy, died, none
	Nonce            string    // in the answer, so that a result names its call
	Instance         string    // that was called
	Via              string    // the gateway, by the word of its client
}

// Grant is a lock record that was committed.
type Grant struct {
	Seq         int64
	Queue       string
	Key         string // '#' and the id for a solo entry
	Token, Last int64  // the last entry that it covers
	Node        int64
	Process     string // name of the process's incarnation
	At          time.Time
	Freed       time.Time // zero: not yet
	FreedSeq    int64
	Transaction int64     // the claim's; a claim that grants several entries records them in any order
	FreeBegan   time.Time // when the transaction that freed it began
}

// Insertion is an entry that was committed.
type Insertion struct {
	Seq, Entry, Op int64
	Queue          string
}

// Ending is the end of an entry as the database keeps it.
type Ending struct {
	Seq, Entry int64
	At         time.Time // zero: the server's clock jumped
	Queue, Key string
	Outcome    string
	Token      int64 // 0: not by a node
	Nonce      string
	Attempt    int
	Crashes    int
	Class      string
}

// Setback is a run that ended without a result: its entry was to be tried again later, or failed.
type Setback struct {
	Seq, Entry int64
	Queue      string
	Token      int64 // of the lock that covered the entry then; 0: none
	Holder     int64 // the node of that lock
	Node       int64 // the one that ran the entry, by the note of its error; 0: no error was noted
	Class      string
}

// Change is a row that was changed in place: a lock, result or failure.
type Change struct {
	What         string
	Entry, Token int64 // of a result or failure, of a lock
	Key          string
}

// Beat is a committed heartbeat of a process, or its registration, with which its lease begins.
type Beat struct {
	Process    string
	At         time.Time
	Registered bool
}

// Death is the end of a process, or a stop of it for longer than its lease.
type Death struct {
	Process string
	At      time.Time
	Killed  bool
	Until   time.Time // the end of a stop; zero: none
}

// Term is a sign of life of a term of the leaders.
type Term struct {
	Number   int64
	At       time.Time
	Lease    time.Duration // from then on; none if it resigned
	Resigned bool
}

// Disturbance is something that keeps recovery from freeing locks, by intent (it suspends itself) or
// because it cannot reach the database.
type Disturbance struct {
	What     string
	From, To time.Time
}

// Unhinted is an entry that a node had to find by itself.
type Unhinted struct {
	Queue string
	Entry int64
	Took  time.Duration // until it ended; Max if it did not
	Max   time.Duration
}

// Sample is how many locks a limited queue had at one moment.
type Sample struct {
	Queue      string
	Locks, Max int
	At         time.Time
}

// Firing is a nominal time of a schedule that was fired.
type Firing struct {
	Job            string
	Nominal, Fired time.Time
	Entry          int64
	Running        bool // its entry had not ended when the firings were read
}

// Tick is a schedule and a nominal time, as an entry was told when it ran.
type Tick struct {
	Job     string
	Nominal int64 // microseconds since 1970
}

// Told is the outcome of an entry that the API answered after the run.
type Told struct {
	Entry int64
	State string
}

// Batch is a batch that a client made, of items 1 to Items.
type Batch struct {
	Label    int64 // in each of its items
	Items    int
	Told     bool // that it was made; else it may have been made, and then as a whole
	Returned time.Time
}

// Item is one item of a batch: the label of the batch and the number of the item.
type Item struct {
	Label int64
	No    int
}

// BatchPart is a part of a batch as the product keeps it, and how often each of its items took effect at least and at
// most.
type BatchPart struct {
	Batch           int64
	No, Least, Most int
	Outcome         string
}

// Table is the largest size that a hot table reached.
type Table struct {
	Name            string
	Bytes, BytesMax int64
	Dead, DeadMax   int64
}

// index holds the lookups that several invariants need.
type index struct {
	*History
	pushByOp    map[int64]*Push
	pushByEntry map[int64]*Push
	grants      map[int64]*Grant // by token
	byKey       map[[2]string][]*Grant
	endings     map[int64][]*Ending
	calls       map[int64][]*Call // by entry
	setbacks    map[int64][]*Setback
	beats       map[string][]time.Time
	stops       map[string][]Death // for longer than half a lease, of processes that went on after it
	allStops    map[string][]Death // with the shorter ones
}

func newIndex(h *History) *index {
	x := &index{
		History: h, pushByOp: map[int64]*Push{}, pushByEntry: map[int64]*Push{}, grants: map[int64]*Grant{},
		byKey: map[[2]string][]*Grant{}, endings: map[int64][]*Ending{}, calls: map[int64][]*Call{},
		setbacks: map[int64][]*Setback{},
		beats:    map[string][]time.Time{}, stops: map[string][]Death{}, allStops: map[string][]Death{},
	}
	x.leaveOutForked()
	for i := range x.Pushes {
		p := &x.Pushes[i]
		x.pushByOp[p.Op] = p
		if p.Entry != 0 && (p.Unique == "" || x.pushByEntry[p.Entry] == nil) {
			x.pushByEntry[p.Entry] = p
		}
	}
	for i := range h.Grants {
		g := &h.Grants[i]
		x.grants[g.Token] = g
		x.byKey[[2]string{g.Queue, g.Key}] = append(x.byKey[[2]string{g.Queue, g.Key}], g)
	}
	for _, grants := range x.byKey {
		slices.SortFunc(grants, func(a, b *Grant) int { return cmp.Compare(a.Seq, b.Seq) })
	}
	for i := range h.Endings {
		x.endings[h.Endings[i].Entry] = append(x.endings[h.Endings[i].Entry], &h.Endings[i])
	}
	for i := range h.Setbacks {
		x.setbacks[h.Setbacks[i].Entry] = append(x.setbacks[h.Setbacks[i].Entry], &h.Setbacks[i])
	}
	for i := range h.Calls {
		x.calls[h.Calls[i].Entry] = append(x.calls[h.Calls[i].Entry], &h.Calls[i])
	}
	for _, b := range h.Beats {
		x.beats[b.Process] = append(x.beats[b.Process], b.At)
	}
	for _, beats := range x.beats {
		slices.SortFunc(beats, time.Time.Compare)
	}
	for _, d := range h.Deaths {
		if !d.Until.IsZero() {
			x.stops[d.Process] = append(x.stops[d.Process], d)
			x.allStops[d.Process] = append(x.allStops[d.Process], d)
		}
	}
	for _, d := range h.Stops {
		x.allStops[d.Process] = append(x.allStops[d.Process], d)
	}
	return x
}

// missed says that for the node which made a call the worker did not answer in time: that the answer came when
// RunMax was over, or that the node was stopped, for however short a time, before it read the answer and went on when
// RunMax was over. The node's clock of the call runs since before the worker saw it, and on a busy machine it reads an
// answer some time after that was sent.
func (x *index) missed(c *Call) bool {
	if c.Closed.Sub(c.Begin) >= x.RunMax-x.Tolerance {
		return true
	}
	g := x.grants[c.Token]
	return g != nil && slices.ContainsFunc(x.allStops[g.Process], func(d Death) bool {
		return d.At.Before(c.Closed.Add(x.Tolerance)) && d.Until.Sub(c.Begin) >= x.RunMax-x.Tolerance
	})
}

// forked says that two primaries took writes at a time, and for a lease after it: what a node began
// under the writes that were lost goes on until it hears of the loss.
func (x *index) forked(at time.Time) bool {
	return !x.Forked[0].IsZero() && at.After(x.Forked[0]) && at.Before(x.Forked[1].Add(2*x.Lease))
}

// leaveOutForked removes the pushes about which two primaries may tell different stories: they, or a
// cancel of them, were answered during the fork, or a worker was called for them. Numbers of entries
// that were drawn on the primary whose writes were lost are drawn again.
func (x *index) leaveOutForked() {
	if x.Forked[0].IsZero() {
		return
	}
	called := map[int64]bool{}
	for i := range x.Calls {
		if x.forked(x.Calls[i].Begin) {
			called[x.Calls[i].Op] = true
		}
	}
	h := *x.History
	h.Pushes = slices.DeleteFunc(slices.Clone(h.Pushes), func(p Push) bool {
		return x.forked(p.Returned) || p.Cancel != nil && x.forked(p.Cancel.Returned) || called[p.Op]
	})
	x.History = &h
}

// silentWithin is the longest for which a process had no committed heartbeat at any moment between two.
func (x *index) silentWithin(process string, from, to time.Time) time.Duration {
	longest := x.silent(process, to)
	for _, b := range x.beats[process] {
		if b.After(from) && !b.After(to) {
			longest = max(longest, x.silent(process, b.Add(-1)))
		}
	}
	return longest
}

// silent is for how long a process had no committed heartbeat at a moment.
func (x *index) silent(process string, at time.Time) time.Duration {
	var last time.Time
	for _, b := range x.beats[process] {
		if b.After(at) {
			break
		}
		last = b
	}
	return at.Sub(last)
}

// Unheard are the processes that made calls for longer than a lease and of which no heartbeat is recorded: a node that
// does not renew its lease calls no worker for so long.
func Unheard(h *History) (processes []string) {
	x := newIndex(h)
	first, last := map[string]time.Time{}, map[string]time.Time{}
	for i := range h.Calls {
		c := &h.Calls[i]
		g := x.grants[c.Token]
		if g == nil {
			continue
		}
		if at := first[g.Process]; at.IsZero() || c.Begin.Before(at) {
			first[g.Process] = c.Begin
		}
		last[g.Process] = laterOf(last[g.Process], c.Begin)
	}
	heard := map[string]bool{}
	for _, b := range h.Beats {
		heard[b.Process] = heard[b.Process] || !b.Registered
	}
	for process, from := range first {
		if !heard[process] && last[process].Sub(from) > h.Lease {
			processes = append(processes, process)
		}
	}
	slices.Sort(processes)
	return processes
}
