package backend

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/pkg/scale"
)

// watches are those of the deployments that were listed, while Kubernetes.Watch runs.
type watches struct {
	ctx     context.Context //nolint:containedctx // lists begin watches that outlive them
	running sync.WaitGroup
	changed func(model string)
	byName  map[string]*podWatch // by deployment
}

// Watch implements scale.Watcher.
func (k *Kubernetes) Watch(ctx context.Context, changed func(model string)) {
	all := &watches{ctx: ctx, changed: changed, byName: map[string]*podWatch{}}
	k.mu.Lock()
	k.watches = all
	k.mu.Unlock()
	sweeps := time.NewTicker(unlistedMax)
	defer sweeps.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-sweeps.C:
			k.sweep(all)
		}
	}
	k.mu.Lock()
	if k.watches == all {
		k.watches = nil
	}
	k.mu.Unlock()
	all.running.Wait()
}

// unlistedMax is how long a watch lasts that no list asks for: its deployment was removed.
const unlistedMax = 5 * time.Minute

func (k *Kubernetes) sweep(all *watches) {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(all.byName, func(_ string, w *podWatch) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		if time.Since(w.askedAt) < unlistedMax {
			return false
		}
		w.stop()
		return true
	})
}

// watchOf is the watch of a deployment, begun or not; nil while nothing is watched. One of another target ends.
func (k *Kubernetes) watchOf(d scale.BackendTarget, t KubernetesTarget) *podWatch {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.watches == nil {
		return nil
	}
	w := k.watches.byName[d.Name]
	if w != nil && w.target == t && w.model == d.Model {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.askedAt = time.Now() // it is not swept before it is read
		return w
	}
	if w != nil {
		w.mu.Lock()
		w.stop()
		w.mu.Unlock()
	}
	w = &podWatch{k: k, all: k.watches, model: d.Model, target: t, cancel: func() {}, askedAt: time.Now()}
	k.watches.byName[d.Name] = w
	return w
}

// podWatch follows the pods of a deployment: a list, and from its version on what the API server says has changed.
// Only lists that the applier of the leader asks for are read. They are answered from here while the server sends
// changes, the last list is no older than checkEvery, and no order was given after it.
//
// A list that differs from what was followed while no event came in between, an answer 410, a stream without an end,
// and an event that cannot be read end the watch: the next list begins another one. A connection that is lost, or
// ended by the server in its time, goes on from the last version.
type podWatch struct {
	k      *Kubernetes
	all    *watches
	model  string
	target KubernetesTarget

	mu       sync.Mutex
	state    watchState
	pods     map[string]pod
	version  string // of the newest change
	selector string
	wanted   bool      // the last order was one of pods
	events   int       // that were read, to tell whether one came during a list
	listedAt time.Time // of the last list that agreed; zero: an order was given since
	askedAt  time.Time
	failures int // in a row
	retryAt  time.Time
	cancel   context.CancelFunc
	toldAt   time.Time
	telling  bool // at the end of tellPause
}

// watchState is how far a watch is.
type watchState int

const (
	watchNone    watchState = iota // a list begins it
	watchPaused                    // until retryAt
	watchOpening                   // asked for
	watchOpen                      // the server sends changes
)

// Times of a watch.
const (
	checkEvery = 10 * time.Second // a list beside the watch: the safety net

	// The server ends a watch after a time between these. One that it has not ended by then, and watchGrace later, is
	// stalled: nothing tells its silence from that of a model at rest before.
	watchMin   = 30 * time.Second
	watchMax   = time.Minute
	watchGrace = 5 * time.Second
	openMax    = 5 * time.Second // for the head of the answer

	retryMin  = 250 * time.Millisecond // doubled with each failure in a row
	retryMax  = 30 * time.Second
	lastsLong = 10 * time.Second // a watch that lasted so long was no failure, whatever ended it

	tellPause = 100 * time.Millisecond // between two calls of changed
)

// current returns the pods where a list need not be read. The mark is for listed.
func (w *podWatch) current() (pods []pod, mark int, current bool) {
	if w == nil {
		return nil, 0, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.askedAt = time.Now()
	if w.state != watchOpen || time.Since(w.listedAt) >= checkEvery {
		return nil, w.events, false
	}
	pods = slices.Collect(maps.Values(w.pods))
	slices.SortFunc(pods, func(a, b pod) int { return cmp.Compare(a.Metadata.Name, b.Metadata.Name) })
	return pods, w.events, true
}

// ordered notes an order. The next list is read from the server: it has to have the effect of the order.
func (w *podWatch) ordered(count int) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wanted = count > 0
	w.listedAt = time.Time{}
}

// listed compares a list with what was followed. It begins the watch where there is none; a deployment that has no
// pod and is to have none needs none.
func (w *podWatch) listed(mark int, selector string, pods []pod, version string) {
	if w == nil {
		return
	}
	byName := make(map[string]pod, len(pods))
	for _, p := range pods {
		byName[p.Metadata.Name] = p
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	followed := w.state == watchOpening || w.state == watchOpen
	if followed && w.selector == selector {
		if w.events != mark {
			return // the list may be from before or after the event: the next one tells
		}
		if maps.EqualFunc(w.pods, byName, sameVersion) && (len(pods) > 0 || w.wanted) {
			w.listedAt = time.Now()
			return
		}
	}
	idle := len(pods) == 0 && !w.wanted
	if followed || idle {
		w.stop()
	}
	w.pods, w.version, w.selector, w.listedAt = byName, version, selector, time.Now()
	if w.state == watchNone && !idle && version != "" && w.all.ctx.Err() == nil {
		ctx, cancel := context.WithCancel(w.all.ctx)
		w.state, w.cancel = watchPaused, cancel
		w.all.running.Go(func() { w.run(ctx) })
	}
}

func sameVersion(a, b pod) bool {
	return a.Metadata.UID == b.Metadata.UID && a.Metadata.Version == b.Metadata.Version
}

// stop ends the watch. The caller holds mu.
func (w *podWatch) stop() {
	w.cancel()
	w.state = watchNone
}

// errRelist is why a watch cannot go on from its last version.
var errRelist = errors.New("the pods have to be listed again")

// run watches until ctx ends, or until the pods have to be listed again.
func (w *podWatch) run(ctx context.Context) {
	for {
		w.mu.Lock()
		pause := time.Until(w.retryAt)
		w.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		began := time.Now()
		err := duty.Protect(ctx, w.k.cfg.Log, func() error { return w.stream(ctx) })
		if !w.ended(ctx, err, time.Since(began)) {
			return
		}
	}
}

// ended notes the end of a stream, and says whether another one goes on from its version.
func (w *podWatch) ended(ctx context.Context, err error, lasted time.Duration) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if ctx.Err() != nil { // stopped: another one may have begun
		return false
	}
	if w.failures++; lasted >= lastsLong {
		w.failures = 0
	}
	w.retryAt = time.Now().Add(retryAfter(err, w.failures))
	w.state = watchPaused
	if w.failures == failuresTold {
		w.k.cfg.Log.WarnContext(ctx, "cannot watch pods, they are listed at each pass",
			"model", w.model, "object", w.target.Name, "error", err)
	}
	if !errors.Is(err, errRelist) {
		return true
	}
	w.stop()
	w.tell()
	return false
}

// failuresTold is how many failures in a row are logged.
const failuresTold = 3

// retryAfter is the pause after a stream that ended, with so many failures in a row: half of it by chance, also behind
// a long stream, since those of all deployments end with their server, and no less than the server asks for. A stream
// that lasted long and ended as it should is followed at once.
func retryAfter(err error, failures int) time.Duration {
	if failures == 0 && (err == nil || errors.Is(err, errRelist)) {
		return 0
	}
	pause := min(retryMin<<min(max(failures-1, 0), 10), retryMax)
	pause = pause/2 + rand.N(pause/2) //nolint:gosec // spreads requests
	var answered *statusError
	if errors.As(err, &answered) {
		pause = max(pause, answered.RetryAfter())
	}
	return pause
}

// stream asks for what changed since the last version and reads until the server ends it, which is no error.
func (w *podWatch) stream(ctx context.Context) error {
	lasts := watchMin + rand.N(watchMax-watchMin) //nolint:gosec // spreads requests
	ctx, cancel := context.WithTimeout(ctx, lasts+watchGrace)
	defer cancel()
	w.mu.Lock()
	if ctx.Err() != nil {
		w.mu.Unlock()
		return ctx.Err()
	}
	w.state = watchOpening
	path := w.target.podsPath(url.Values{
		"watch": {"true"}, "allowWatchBookmarks": {"true"},
		"labelSelector": {w.selector}, "resourceVersion": {w.version},
		"timeoutSeconds": {strconv.Itoa(int(lasts.Seconds()))},
	})
	w.mu.Unlock()
	request, err := w.k.request(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	opening := time.AfterFunc(openMax, cancel)
	reply, err := w.k.stream.Do(request)
	opening.Stop()
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(reply.Body, eventMax))
		err := refused("watch pods", reply, text)
		if reply.StatusCode == http.StatusGone {
			err = errors.Join(errRelist, err)
		}
		return err
	}
	w.mu.Lock()
	if ctx.Err() == nil {
		w.state = watchOpen
	}
	w.mu.Unlock()
	err = w.read(ctx, reply.Body)
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%w: the watch is stalled: it did not end in its time", errRelist)
	}
	return err
}

// eventMax bounds an event in bytes: an object of etcd is smaller.
const eventMax = 4 << 20

// read takes events until the stream ends. A line that breaks off is a lost connection.
func (w *podWatch) read(ctx context.Context, body io.Reader) error {
	bounded := &io.LimitedReader{R: body}
	events := json.NewDecoder(bounded)
	for {
		bounded.N = eventMax
		var e event
		err := events.Decode(&e)
		switch {
		case errors.Is(err, io.EOF) && bounded.N > 0:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case isSyntax(err) || bounded.N <= 0:
			return fmt.Errorf("%w: an event is not readable: %w", errRelist, err)
		case err != nil:
			return fmt.Errorf("read the watch: %w", err)
		}
		if err := w.take(ctx, e); err != nil {
			return err
		}
	}
}

func isSyntax(err error) bool {
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	return errors.As(err, &syntax) || errors.As(err, &kind)
}

// event is a WatchEvent of the Kubernetes API.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// take applies an event. One that was sent twice changes nothing. A pod whose labels do not match any more is sent as
// DELETED, one whose labels match since now as ADDED.
func (w *podWatch) take(ctx context.Context, e event) error {
	if e.Type == "ERROR" {
		return streamError(e.Object)
	}
	var p pod
	if err := json.Unmarshal(e.Object, &p); err != nil {
		return fmt.Errorf("%w: the object of an event %q is not readable: %w", errRelist, e.Type, err)
	}
	if p.Metadata.Version == "" {
		return fmt.Errorf("%w: the object of an event %q has no version", errRelist, e.Type)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if ctx.Err() != nil { // the pods are those of another watch
		return ctx.Err()
	}
	before, was := w.pods[p.Metadata.Name]
	switch e.Type {
	case "BOOKMARK":
		w.version = p.Metadata.Version
		return nil
	case "ADDED", "MODIFIED":
		w.pods[p.Metadata.Name] = p
	case "DELETED":
		if was && before.Metadata.UID == p.Metadata.UID { // else it is of a pod before it, of the same name
			delete(w.pods, p.Metadata.Name)
		}
	default:
		return fmt.Errorf("%w: an event of type %q", errRelist, e.Type)
	}
	w.version = p.Metadata.Version
	w.events++
	after, is := w.pods[p.Metadata.Name]
	if was != is || is && !sameInstance(w.target.instance(before), w.target.instance(after)) {
		w.tell()
	}
	return nil
}

func sameInstance(a, b scale.BackendInstance) bool {
	return a.State == b.State && a.Endpoint == b.Endpoint && a.Began.Equal(b.Began)
}

// streamError is the error of an event ERROR, whose object is a Status.
func streamError(object json.RawMessage) error {
	var said struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
		Details struct {
			Seconds int `json:"retryAfterSeconds"`
		} `json:"details"`
	}
	if err := json.Unmarshal(object, &said); err != nil {
		return fmt.Errorf("%w: an error in the watch is not readable: %w", errRelist, err)
	}
	err := &statusError{
		code: said.Code, doing: "watch pods", reason: said.Message,
		after: time.Duration(max(0, said.Details.Seconds)) * time.Second,
	}
	return errors.Join(errRelist, err)
}

// tell has changed called, at most once in tellPause: a rollout of many pods is a few calls. The caller holds mu.
func (w *podWatch) tell() {
	if w.telling {
		return
	}
	w.telling = true
	time.AfterFunc(tellPause-time.Since(w.toldAt), func() {
		w.mu.Lock()
		w.telling, w.toldAt = false, time.Now()
		w.mu.Unlock()
		w.all.changed(w.model)
	})
}
