package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// A stream goes to the database in chunks: of so many lines or bytes, or of what has come within the linger.
const (
	chunkLines  = 1000
	chunkBytes  = 2 << 20
	chunkLinger = 5 * time.Millisecond
	// streamIdle is how long a client may send nothing, or take nothing of the answer.
	streamIdle = 30 * time.Second
	// streamCheck is how often the token of a stream is looked up while nothing comes. tokens keeps what it finds.
	streamCheck = time.Second
)

// pusher accepts entries, all or none, and knows how many, from the first one on, were accepted before.
// *invalidation.Queue is one.
type pusher interface {
	Push(ctx context.Context, pushes ...invalidation.Push) ([]invalidation.Pushed, error)
	AcceptedBefore(ctx context.Context, pushes ...invalidation.Push) (int, error)
}

// pushStream accepts the lines of a body one by one. A client that asks for application/x-ndjson is told of each line
// while it sends; others get a summary.
func (a *API) pushStream(w http.ResponseWriter, r *http.Request) error {
	queue, err := a.queues.Get(r.Context(), r.PathValue("queue"))
	if err != nil {
		return err
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	share, err := a.streams.enter(callerOf(r.Context()))
	if err != nil {
		return err
	}
	defer share.close()
	rc := http.NewResponseController(w)
	body := &idleReader{body: r.Body, rc: rc, idle: streamIdle, multiplexed: r.ProtoMajor == 2}
	r.Body = io.NopCloser(body)
	plain, err := inflated(r)
	if err != nil {
		return err
	}
	out := newAnswers(w, r, strings.Contains(r.Header.Get("Accept"), "ndjson"))
	if out.each {
		_ = rc.EnableFullDuplex() // HTTP/2 needs no leave to read and write at once
	}
	trace := r.Header.Get("Traceparent")
	s := &lineStream{
		queue: queue, timeout: a.cfg.Timeout, answers: out, allowed: a.stillValid, share: share, now: a.operator.Now,
		spend: func(n int) (int, error) {
			if err := a.budgets.check(r.Context(), a.operator, callerOf(r.Context())); err != nil {
				return 0, err
			}
			return a.rates.some(callerOf(r.Context()), n)
		},
		giveBack: func(n int) { a.rates.giveBack(callerOf(r.Context()), n) },
		pushOf: func(e entryToPush, number int64) (invalidation.Push, error) {
			return a.pushOf(callerOf(r.Context()), e, key, trace, number)
		},
		registerKey: func(flow string) (leave func(), err error) { return a.registerKey(r, flow) },
	}
	return out.finish(endedEarly(s.run(r.Context(), plain, func() {
		if !out.started {
			w.Header().Set("Connection", "close")
		}
		body.stop()
	})))
}

// lineStream is a push of entries that come one a line, in memory that does not grow with their number. Each line is
// accepted or refused by itself, in order; a line that is refused does not keep those behind it out.
type lineStream struct {
	queue   pusher
	timeout time.Duration // of one chunk
	pushOf  func(e entryToPush, number int64) (invalidation.Push, error)
	answers *answers
	share   *streamShare
	allowed func(context.Context) error // asked before each chunk, and while none comes
	now     func(context.Context) (time.Time, error)
	// spend takes up to n entries from the rate of the token, and returns how many with the error that refuses the rest
	spend func(n int) (int, error)
	// giveBack returns entries to the rate that it took and that had been accepted before.
	giveBack func(n int)
	// registerKey registers the Idempotency-Key of the stream in the flow of its first line that can be read.
	registerKey func(flow string) (leave func(), err error)

	leave func() // ends what registerKey has registered; nil before
}

// lineOverhead is what a line that is on its way takes beside its text, in bytes.
const lineOverhead = 512

// streamLine is a line on its way, and its answer.
type streamLine struct {
	number int64
	bytes  int64
	push   invalidation.Push
	delays delays
	pushed invalidation.Pushed
	err    error
}

// run pushes everything that body has, and returns why it did not come to its end, nil if it did. stop makes a read of
// the body that is under way return.
func (s *lineStream) run(ctx context.Context, body io.Reader, stop func()) error {
	if s.share == nil {
		s.share = &streamShare{}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() {
		if s.leave != nil {
			s.leave()
		}
	}()
	incoming, ended := make(chan *streamLine, chunkLines), make(chan error, 1)
	go func() { ended <- s.read(ctx, newLines(body), incoming) }()
	if err := s.pass(ctx, incoming); err != nil {
		cancel()
		stop()
		for range incoming { // what was read is not pushed any more
		}
		<-ended //nolint:errcheck // that it was cancelled
		return err
	}
	return <-ended
}

// pass pushes what comes until there is no more, or until the token is not valid any more.
func (s *lineStream) pass(ctx context.Context, incoming <-chan *streamLine) error {
	check := time.NewTicker(streamCheck)
	defer check.Stop()
	for {
		select {
		case first, open := <-incoming:
			if !open {
				return nil
			}
			chunk := collect(first, incoming)
			n, err := s.accept(ctx, chunk)
			if werr := s.answers.add(chunk[:n]); err == nil {
				err = werr
			}
			if err != nil {
				return err
			}
			for _, line := range chunk {
				s.share.done(line.bytes)
			}
		case <-check.C:
			// Where the database does not answer, the next chunk finds out.
			if err := s.valid(ctx); errors.Is(err, errNoToken) {
				return err
			}
		}
	}
}

// valid returns why the sender may not go on.
func (s *lineStream) valid(ctx context.Context) error {
	timed, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	if err := s.allowed(timed); err != nil {
		return classify(timed, err)
	}
	return nil
}

// read decodes lines until the body ends. It waits where too much has been read that was not pushed yet.
func (s *lineStream) read(ctx context.Context, in *lines, out chan<- *streamLine) error {
	defer close(out)
	in.grow = func(bytes int64) error { return s.share.grow(ctx, bytes) }
	in.shrink = s.share.shrink
	for {
		text, err := in.next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil && !errors.Is(err, errLongLine) {
			return err
		}
		line := &streamLine{number: in.number, bytes: int64(len(text)) + lineOverhead, err: err}
		if err == nil {
			line.err = s.decode(text, line)
		}
		if err := s.share.add(ctx, line.bytes); err != nil {
			return err
		}
		select {
		case out <- line:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *lineStream) decode(text []byte, line *streamLine) error {
	if isArray(text) {
		return fmt.Errorf("%w: a line of a stream is one object", errMalformed)
	}
	entries, _, err := decode(text, 1)
	if err != nil {
		return err
	}
	line.delays = entries[0].delays()
	line.push, err = s.pushOf(entries[0], line.number)
	return err
}

// collect takes along with a line what comes soon after it.
func collect(first *streamLine, incoming <-chan *streamLine) []*streamLine {
	chunk, bytes := []*streamLine{first}, first.bytes
	linger := time.NewTimer(chunkLinger)
	defer linger.Stop()
	for len(chunk) < chunkLines && bytes < chunkBytes {
		select {
		case line, open := <-incoming:
			if !open {
				return chunk
			}
			chunk, bytes = append(chunk, line), bytes+line.bytes
		case <-linger.C:
			return chunk
		}
	}
	return chunk
}

// accept pushes the lines of a chunk that could be read and returns for how many lines it knows the answer. What keeps
// the other ones from being tried is the error.
func (s *lineStream) accept(ctx context.Context, chunk []*streamLine) (int, error) {
	if err := s.valid(ctx); err != nil {
		return 0, err
	}
	good := make([]*streamLine, 0, len(chunk))
	for _, line := range chunk {
		if line.err == nil {
			good = append(good, line)
		}
	}
	if len(good) == 0 {
		return len(chunk), nil // all have their answer, and nothing is to be paid for
	}
	if s.leave == nil {
		var err error
		if s.leave, err = s.registerKey(good[0].push.Flow); err != nil {
			return 0, err
		}
	}
	if err := s.setTimes(ctx, good); err != nil {
		return 0, err
	}
	tried, err := s.pay(ctx, good)
	if err == nil {
		return len(chunk), nil
	}
	return slices.Index(chunk, good[tried]), err
}

// setTimes is setTimes for the lines of a chunk.
func (s *lineStream) setTimes(ctx context.Context, lines []*streamLine) error {
	timed, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	err := setTimes(timed, s.now, len(lines), func(i int) (delays, *invalidation.Push) {
		return lines[i].delays, &lines[i].push
	})
	if err != nil {
		return classify(timed, err)
	}
	return nil
}

// pay pushes lines as far as the limits of the token let it, and returns how many have their answer. What was accepted
// before costs nothing, so that a stream that is sent again gets further than the time before.
func (s *lineStream) pay(ctx context.Context, lines []*streamLine) (int, error) {
	for tried := 0; ; {
		may, refused := s.spend(len(lines) - tried)
		paid := may > 0
		if !paid {
			var err error
			if may, err = s.acceptedBefore(ctx, lines[tried:], refused); err != nil {
				return tried, err
			}
		}
		n, err := s.push(ctx, lines[tried:tried+may])
		free := n
		if paid {
			if free = replayedLines(lines[tried : tried+n]); free > 0 {
				s.giveBack(free)
			}
		}
		tried += n
		if err == nil && free == 0 {
			err = refused
			if refused != nil {
				err = classify(ctx, refused)
			}
		}
		if err != nil || tried == len(lines) {
			return tried, err
		}
	}
}

// acceptedBefore returns how many lines, from the first one on, a refusal by the limits of the token does not concern.
func (s *lineStream) acceptedBefore(ctx context.Context, lines []*streamLine, refused error) (int, error) {
	timed, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	n, err := acceptedBefore(timed, s.queue, pushesOfLines(lines), refused)
	if err != nil {
		return 0, classify(timed, err)
	}
	return n, nil
}

// replayedLines counts the lines that were accepted before.
func replayedLines(lines []*streamLine) (n int) {
	for _, l := range lines {
		if l.err == nil && l.pushed.Verdict == invalidation.Replayed {
			n++
		}
	}
	return n
}

func pushesOfLines(lines []*streamLine) []invalidation.Push {
	pushes := make([]invalidation.Push, len(lines))
	for i, l := range lines {
		pushes[i] = l.push
	}
	return pushes
}

// push pushes lines in one statement; where one of them is not acceptable or not all have room, half and half, until it
// is known which. It returns how many lines it has answers for.
func (s *lineStream) push(ctx context.Context, lines []*streamLine) (int, error) {
	if len(lines) == 0 {
		return 0, nil
	}
	pushes := pushesOfLines(lines)
	timed, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	pushed, err := s.queue.Push(timed, pushes...)
	switch {
	case err == nil:
		for i, l := range lines {
			l.pushed = pushed[i]
		}
		return len(lines), nil
	case len(lines) > 1 && (invalidation.RefusesPush(err) || errors.Is(err, invalidation.ErrQueueFull)):
	case !invalidation.RefusesPush(err):
		return 0, classify(timed, inUse(err, pushes...))
	default:
		lines[0].err = err
		return 1, nil
	}
	half := len(lines) / 2
	n, err := s.push(ctx, lines[:half])
	if err != nil {
		return n, err
	}
	n, err = s.push(ctx, lines[half:])
	return half + n, err
}
