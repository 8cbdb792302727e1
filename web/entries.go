package web

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/format"
)

// entriesPerPage is how many entries a page lists.
const entriesPerPage = 50

// entriesView is a list of the entries of a queue that match a filter.
type entriesView struct {
	Queue, State, Flow, LockKey, Name string
	Queues                            []string
	States                            []string
	Rows                              []entryRow
	Next                              int64 // id after which the next page begins; 0: there is none
	After                             int64
	Filtered                          bool
}

// entryRow is an entry in a list.
type entryRow struct {
	operator.EntryStatus
	Why     string // why it does not run, in a few words
	Address string // of what blocks it, below the dashboard's; empty: nothing else
	Node    string
}

func (d *Dashboard) entryPages() {
	d.page(page{
		path: "entries", nav: "Entries", section: "Work", title: "Entries",
		template: "entries", live: true, read: d.listEntries,
	})
	d.page(page{
		path: "entries/{id}", section: "entries", title: "Entry",
		template: "entry", live: true, read: d.showEntry,
	})
}

func (d *Dashboard) listEntries(ctx context.Context, q query) (any, error) {
	queues, err := d.sampledQueues(ctx)
	if err != nil {
		return nil, err
	}
	v := entriesView{
		Queue: q.Get("queue"), State: q.Get("state"), Flow: q.Get("flow"), LockKey: q.Get("lock_key"),
		Name:   q.Get("name"),
		States: operator.States(), After: q.Int("after"),
	}
	for _, x := range queues {
		v.Queues = append(v.Queues, x.Name)
	}
	if v.Queue == "" && len(queues) > 0 {
		v.Queue = slices.MaxFunc(queues, func(a, b operator.Queue) int {
			return cmp.Compare(a.Initial+a.Pending+a.Disabled, b.Initial+b.Pending+b.Disabled)
		}).Name
	}
	v.Filtered = v.State != "" || v.Flow != "" || v.LockKey != "" || v.Name != ""
	if v.Queue == "" {
		return v, nil
	}
	filter := operator.EntryFilter{
		Queue: v.Queue, State: v.State, Flow: v.Flow, LockKey: v.LockKey, Name: v.Name, After: v.After,
		Limit: entriesPerPage + 1,
	}
	found, err := cached(ctx, d, keyOf("entries", filter), beat,
		func(ctx context.Context) ([]operator.EntryStatus, error) { return d.db.Entries(ctx, filter) })
	if err != nil {
		return nil, err
	}
	if len(found) > entriesPerPage {
		found = found[:entriesPerPage]
		v.Next = found[entriesPerPage-1].ID
	}
	at := slices.IndexFunc(queues, func(x operator.Queue) bool { return x.Name == v.Queue })
	if at < 0 {
		return nil, fmt.Errorf("queue %q: %w", v.Queue, invalidation.ErrQueueNotFound)
	}
	v.Rows, err = d.entryRows(ctx, queues[at], found)
	return v, err
}

// entryRows finds out in a few reads why each entry of a list does not run.
func (d *Dashboard) entryRows(ctx context.Context, q operator.Queue, found []operator.EntryStatus) ([]entryRow,
	error,
) {
	var keys []string
	for _, e := range found {
		if e.LockKey != "" && e.State == "pending" && !slices.Contains(keys, e.LockKey) {
			keys = append(keys, e.LockKey)
		}
	}
	held, err := cached(ctx, d, keyOf("held", q.Name, keys), beat,
		func(ctx context.Context) ([]operator.HeldKey, error) { return d.db.HeldKeys(ctx, q.Name, keys) })
	if err != nil {
		return nil, err
	}
	names, err := d.nodeNames(ctx)
	if err != nil {
		return nil, err
	}
	holders := make(map[string]operator.HeldKey, len(held))
	for _, h := range held {
		holders[h.LockKey] = h
	}
	rows := make([]entryRow, len(found))
	for i, e := range found {
		rows[i] = entryRow{EntryStatus: e}
		if e.NodeID != nil {
			rows[i].Node = cmp.Or(names[*e.NodeID], strconv.FormatInt(int64(*e.NodeID), 10))
		}
		rows[i].Why, rows[i].Address = shortReason(q, e, rows[i].Node, holders)
	}
	return rows, nil
}

// shortReason says in a few words why an entry does not run, in the order of explain: the entry,
// its queue, its key. The page of the entry has all reasons.
func shortReason(q operator.Queue, e operator.EntryStatus, node string, holders map[string]operator.HeldKey) (text,
	address string,
) {
	queue := "queues/" + q.Name
	holder, held := holders[e.LockKey]
	switch {
	case e.State == "computing":
		return "runs on " + node, "nodes"
	case e.State == "disabled":
		return "disabled", ""
	case e.StartBy != nil && e.StartBy.Before(time.Now()), e.FinishBy != nil && e.FinishBy.Before(time.Now()):
		return "expired", ""
	case e.State == "initial" && e.DueAt != nil && e.DueAt.After(time.Now()) && e.Attempt > 0:
		return "waits for its next attempt", ""
	case e.State == "initial":
		return "not due", ""
	case q.OutOfService:
		return "queue is out of service", queue
	case q.Paused:
		return "queue is paused", queue
	case q.Blocked != nil:
		return strings.ReplaceAll(*q.Blocked, "_", " "), queue
	case held:
		return "lock key is held by " + cmp.Or(holder.Node, "a node"), "locks"
	}
	return "in line", ""
}

// bulkVerbs are changes of all entries or failures that match a filter.
func (d *Dashboard) bulkVerbs() {
	entries, failures := []string{"queue", "flow", "lock_key", "name"}, []string{"queue", "class", "fingerprint"}
	of := []field{everything, perSecond}
	ofAge := append([]field{{
		Name: "older_than", Label: "Older than", Kind: "text", Hint: "such as 30m or 24h; empty: of any age",
	}}, of...)
	d.bulkVerb(operator.CancelEntries, verb{
		title: "Cancel entries", objects: entries, fields: ofAge, destroys: true,
		effect: "Ends the entries that match. Those that run are asked to stop, and end when their node hears of it.",
	})
	d.bulkVerb(operator.DeleteEntries, verb{
		title: "Cancel waiting entries", objects: entries, fields: ofAge, destroys: true,
		effect: "Ends the entries that match and do not run. Running ones go on.",
	})
	d.bulkVerb(operator.DisableAll, verb{
		title: "Disable entries", objects: entries, fields: ofAge,
		effect: "The entries that match are not claimed until they are enabled. Runs go on to their end.",
	})
	d.bulkVerb(operator.EnableAll, verb{
		title: "Enable entries", objects: entries, fields: ofAge,
		effect: "Disabled entries that match go back to their positions.",
	})
	d.bulkVerb(operator.RetryFailures, verb{
		title: "Retry failures", objects: failures, fields: of,
		effect: "The failures that match go back into their queue, with no attempt spent.",
	})
	d.bulkVerb(operator.DiscardFailures, verb{
		title: "Discard failures", objects: failures, fields: of, destroys: true,
		effect: "The failures that match are deleted. Only the audit keeps a record.",
	})
}

// bulkVerb registers a change that starts an operation. Its first object is the queue, the others are filters.
func (d *Dashboard) bulkVerb(of operator.OperationVerb, v verb) {
	v.name, v.role, v.optional = "bulk_"+string(of), operatorRole, v.objects[1:]
	v.effect += " The elected leader carries it out in the background; the page of operations displays its progress, " +
		"and cancels it."
	v.preview, v.do = d.previewBulk(of), d.startBulk(of)
	v.next = func(form) string { return "operations" }
	d.verb(v)
}

var everything = field{Name: "all", Label: "All of the queue", Kind: "checkbox", Hint: "in place of a filter"}

var perSecond = field{Name: "per_second", Label: "Changes a second, at most", Kind: "number", Value: "1000"}

// bulk reads an operation from a form.
func bulk(v operator.OperationVerb, in form) (operator.OperationRequest, error) {
	o := operator.OperationRequest{Queue: in.Get("queue"), Verb: v}
	f := &o.Filter
	f.Flow, f.LockKey, f.Name = in.Get("flow"), in.Get("lock_key"), in.Get("name")
	f.Class, f.Pattern = in.Get("class"), in.Get("fingerprint")
	f.All = in.Get("all") != ""
	var err error
	if f.OlderThan, err = in.OptionalDuration("older_than"); err != nil {
		return o, err
	}
	if in.Get("per_second") != "" {
		n, err := in.Number("per_second", 1, 100_000)
		if err != nil {
			return o, err
		}
		o.PerSecond = int(n)
	}
	return o, nil
}

// unfiltered reports whether a filter is empty, so that the operation would be about the whole queue.
func unfiltered(f operator.Filter) bool {
	return f.Flow == "" && f.LockKey == "" && f.Name == "" && f.Class == "" && f.Pattern == "" && f.OlderThan == 0
}

// checkChoice refuses an empty filter, which may be one that was lost on its way, unless all was chosen.
func checkChoice(f operator.Filter) error {
	switch none := unfiltered(f); {
	case none && !f.All:
		return fmt.Errorf("there is no filter. Choose all of the queue if you mean it: %w", invalidation.ErrInvalid)
	case !none && f.All:
		return fmt.Errorf("give a filter or choose all of the queue, not both: %w", invalidation.ErrInvalid)
	}
	return nil
}

func (d *Dashboard) previewBulk(v operator.OperationVerb) func(context.Context, form) (preview, error) {
	return func(ctx context.Context, in form) (preview, error) {
		o, err := bulk(v, in)
		if err != nil {
			return preview{}, err
		}
		o.Filter.All = unfiltered(o.Filter)
		n, whole, err := d.db.CountFirst(ctx, o)
		p := preview{Count: format.Count(n) + " " + map[bool]string{true: "entry", false: "entries"}[n == 1]}
		switch {
		case !whole && n == 0:
			p.Count = "none of the first 100,000 of the queue, and perhaps later ones"
		case !whole:
			p.Count = "at least " + p.Count
		}
		if o.Filter.All {
			p.Warning = "There is no filter: it is about the whole queue, and needs that choice."
		}
		return p, err
	}
}

func (d *Dashboard) startBulk(v operator.OperationVerb) func(context.Context, form, invalidation.By) (string,
	error) {
	return func(ctx context.Context, in form, by invalidation.By) (string, error) {
		o, err := bulk(v, in)
		if err == nil {
			err = checkChoice(o.Filter)
		}
		if err != nil {
			return "", err
		}
		o.By = by
		id, err := d.change.StartOperation(ctx, o)
		return fmt.Sprintf("Operation %d has begun.", id), err
	}
}
