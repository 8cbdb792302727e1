package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// OutcomeKind of an outcome.
type OutcomeKind uint8

// Unknown is the zero value on purpose: an outcome that was never filled in must
// not be taken for a call that did not run.
const (
	Unknown   OutcomeKind = iota // it may have run
	Done                         // it ran; Result holds the answer
	Accepted                     // the worker runs it under Remote
	Busy                         // refused for want of capacity; nothing ran
	NotReady                     // the worker cannot serve now; nothing ran unless MaybeRunning
	Rejected                     // the worker refuses this entry for good
	Failed                       // it ran and failed
	Cancelled                    // the worker is known to have stopped it, whoever may have asked for that
)

var kindNames = [...]string{"unknown", "done", "accepted", "busy", "not_ready", "rejected", "failed", "cancelled"}

// String names the kind as logs and metrics show it.
func (k OutcomeKind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Class is the kind of an error, as far as the worker reported it.
type Class string

// The error classes. They decide what happens next: oom retries only where
// there is more memory, context_lost drains the instance first, busy costs
// nothing, input is not retried, transient is retried.
const (
	ClassNone        Class = ""
	ClassOOM         Class = "oom"
	ClassContextLost Class = "context_lost"
	ClassBusy        Class = "busy"
	ClassInput       Class = "input"
	ClassTransient   Class = "transient"
)

// Outcome is the result of one exchange with a worker.
type Outcome struct {
	Kind       OutcomeKind
	Result     json.RawMessage // Done: the answer of the model
	Remote     string          // Accepted: the worker's name for the run
	RetryAfter time.Duration   // Busy, NotReady: as the worker asked for; 0 when it did not
	Class      Class           // Failed, Rejected; on NotReady a hint about the instance
	StatusCode int             // HTTP status; 0 when there was no answer
	Reason     string          // one line for a person; carries no secret
	Err        error           // a limit below, *TooLargeError, or the transport's

	// MaybeRunning: the worker may still be at it. The slot stays counted until
	// a probe or a confirmed cancel says otherwise.
	MaybeRunning bool

	// Alone: the entry was in a batch that did not succeed; try it outside one.
	Alone bool

	// Aborted: the server gave the generation up half way, as it does when it shuts down.
	Aborted bool

	// Misrouted: the instance does not have the model of the call, or is another server by now.
	Misrouted bool

	// Stated: the failure is the worker's own report on the run, in the words of its protocol.
	Stated bool

	// Unsent: the request never left this process, so that the outcome says nothing of the instance.
	Unsent bool

	// Starting: accepted, but the worker has not begun (cold start, its own
	// queue). Such time is charged to no limit of the run. On NotReady: the server is still loading.
	Starting bool

	// Ran is how much of a run that is handed over was charged to its limit. Of Follow alone.
	Ran time.Duration

	// Progress changes whenever the worker's report changes.
	Progress string

	Tokens  Tokens          // OpenAI: as the server counted them
	Logs    string          // Cog: the run's log
	Metrics json.RawMessage // Cog: measurements of the worker
	SentAt  time.Time       // when the request had been handed to the network; zero: never

	// FirstByteAt is when the first byte of the answer came; zero: none did.
	FirstByteAt time.Time
}

// Tokens that a call took and made.
type Tokens struct {
	In     int64 // of the prompt, those that were cached included
	Cached int64 // of these, the ones that the server had in its cache
	Out    int64 // generated
}

// FreeOfCharge reports whether the outcome must not consume an attempt.
func (o Outcome) FreeOfCharge() bool { return o.Kind == Busy || o.Kind == NotReady }

// Final reports whether the outcome ends a run by itself.
func (o Outcome) Final() bool {
	return o.Kind == Done || o.Kind == Failed || o.Kind == Rejected || o.Kind == Cancelled
}

// ofAccepted returns what an outcome means of a run that the worker has accepted: it cannot be refused for want of
// capacity any more, so that a failure in such words, of a server that the run itself called, is a failure.
func (o Outcome) ofAccepted() Outcome {
	if o.Kind == Busy {
		o.Kind, o.Class = Failed, ClassTransient
	}
	return o
}

// ErrStaleToken says that the worker has seen a newer token for the entry: this
// lock is lost. Nothing ran; no attempt is to be spent on it.
var ErrStaleToken = errors.New("worker has seen a newer token for the entry")

// ErrSharedID says that the worker gave two runs one id: its answers under that id may be those of
// either entry.
var ErrSharedID = errors.New("worker gave the id of another run")

// Limits that end a run from this side.
var (
	ErrRunLimit   = errors.New("run time limit reached")
	ErrDeadline   = errors.New("deadline of the entry reached")
	ErrNoProgress = errors.New("no progress within the limit")
	ErrStartLimit = errors.New("worker did not start within the limit")
	ErrSilence    = errors.New("worker stopped answering polls")
)

// TooLargeError reports an answer larger than the model allows.
type TooLargeError struct{ LimitBytes int64 }

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("answer is larger than max_response_bytes (%d); raise it, or let the worker return a reference",
		e.LimitBytes)
}

func done(result json.RawMessage, status int) Outcome {
	return Outcome{Kind: Done, Result: result, StatusCode: status}
}

func failed(class Class, reason string) Outcome {
	return Outcome{Kind: Failed, Class: class, Reason: Clip(reason)}
}

func unknown(reason string) Outcome {
	return Outcome{Kind: Unknown, Reason: Clip(reason), MaybeRunning: true}
}

// Clip keeps a worker's text to a line that fits a log and a failure row.
func Clip(text string) string {
	const most = 500
	clean := []rune(text)
	for i, r := range clean {
		if r < ' ' {
			clean[i] = ' '
		}
	}
	if len(clean) > most {
		return string(clean[:most]) + "…"
	}
	return string(clean)
}
