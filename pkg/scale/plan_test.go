package scale

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func began(ago time.Duration) time.Time { return noon.Add(-ago) }

// ready is a registered instance that takes requests.
func ready(id int32, held int) registration {
	name, since := string(rune('a'+id-1)), began(time.Hour)
	return registration{
		ID: id, Server: name, Endpoint: "http://" + name, Ready: true, EverReady: true, Held: held,
		TemplateHash: "t1", CreatedAt: since, BackendBeganAt: &since,
	}
}

func withHeld(r registration, held int) registration {
	r.Held = held
	return r
}

func drains(r registration) registration {
	r.Ready, r.Draining, r.DrainedByUs = false, true, true
	return r
}

// in are the same instances as their backend reports them.
func in(all ...registration) []BackendInstance {
	var found []BackendInstance
	for _, r := range all {
		found = append(found, BackendInstance{
			Name: r.Server, Endpoint: r.Endpoint, Began: r.CreatedAt, State: InstanceRunning, TemplateHash: r.TemplateHash,
		})
	}
	return found
}

func decided(desired, ordered int) applied {
	at := began(time.Minute)
	return applied{deploymentRow: deploymentRow{
		Name: "own", Model: "llama", Backend: backendLocal, Mode: "full", Desired: desired, DecidedAt: &at, OrderID: 7,
		AppliedID: 7, AppliedAt: &at, Ordered: ordered, TemplateHash: "t1",
	}}
}

func TestPlan(t *testing.T) {
	lately := began(time.Second)
	off, old, outdated := drains(ready(2, 0)), ready(1, 0), ready(1, 0)
	old.EverReady, old.Ready = false, false
	outdated.TemplateHash = "t0"
	replace := began(10 * time.Minute)
	soon := noon.Add(time.Second)
	blocked := decided(3, 1)
	blocked.RetryAt = &soon
	stuck := decided(1, 1)
	stuck.ReplaceBefore = &replace
	disabled, undecided, anywhere := decided(0, 2), decided(0, 2), decided(0, 2)
	disabled.Mode, undecided.DecidedAt, anywhere.Off = "disabled", nil, true
	named := decided(2, 2)
	named.Removing = []string{"b"}
	namedA := decided(2, 2)
	namedA.Removing = []string{"a"}
	sick, alsoSick, hanging := ready(1, 1), ready(2, 0), decided(2, 2)
	sick.Ready, sick.Unhealthy, alsoSick.Ready, alsoSick.Unhealthy = false, true, false, true
	hanging.Unhealthy = map[string]time.Time{"a": began(time.Hour), "b": began(time.Hour)}
	hanging.SeenAt = &lately
	afterGap, halfHour := hanging, began(30*time.Minute)
	afterGap.SeenAt = &halfHour
	briefly, starting := decided(2, 2), ready(2, 0)
	briefly.SeenAt = &lately
	briefly.Unhealthy = map[string]time.Time{"a": began(time.Minute)}
	starting.Ready, starting.EverReady, starting.CreatedAt = false, false, began(time.Minute)
	waiting := starting
	waiting.CreatedAt = began(11 * time.Minute)
	full, ending0 := decided(1, 1), in(outdated)
	ending0[0].State = InstanceEnding
	recent := began(time.Minute)
	full.NoRoomAt = &recent
	bounded, retried := decided(1, 1), decided(2, 1)
	bounded.full, retried.NoRoomAt, retried.RetryAt = true, &recent, &soon
	failed := in(ready(1, 0))
	failed[0].State, failed[0].Message = InstanceFailed, "exit status 1"
	successor := in(ready(1, 0))
	successor[0].Began, successor[0].Endpoint = began(time.Minute), "http://b"
	ending := in(ready(1, 0))
	ending[0].State = InstanceEnding
	byAnna := drains(ready(2, 0))
	byAnna.DrainedByUs, byAnna.DrainingAt = false, &lately
	removed, expired, longAgo, succeeded := byAnna, byAnna, byAnna, drains(ready(1, 0))
	removed.Removed, expired.Expired, longAgo.DrainingAt, succeeded.DrainedByUs = true, true, &halfHour, false
	unready := ready(1, 0)
	unready.Ready, unready.EverReady = false, false
	unregistered := in(ready(1, 0))
	noAddress := in(ready(1, 0))
	noAddress[0].Endpoint = ""

	for _, c := range []struct {
		name       string
		s          applied
		registered []registration
		found      []BackendInstance
		unlisted   bool

		count           int // of the order; -1: none
		remove          []string
		register        int
		drain, forget   []string
		undrain         []int32
		existing, fails int
	}{
		{name: "nothing to do", s: decided(2, 2), registered: []registration{ready(1, 1), ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: -1, existing: 2},
		{name: "one more", s: decided(3, 2), registered: []registration{ready(1, 1), ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: 3, existing: 2},
		{name: "one fewer: the idle one drains first, and still exists", s: decided(1, 2), registered: []registration{ready(1, 1), ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: -1, drain: []string{"b"}, existing: 2},
		{name: "a drained one with a request stays", s: decided(1, 2), registered: []registration{ready(1, 1), drains(ready(2, 1))}, found: in(ready(1, 0), ready(2, 0)), count: -1, existing: 2},
		{name: "a drained one without requests is removed", s: decided(1, 2), registered: []registration{ready(1, 1), off}, found: in(ready(1, 0), ready(2, 0)), count: 1, remove: []string{"b"}, existing: 2},
		{name: "a drain ends before anything is started", s: decided(3, 2), registered: []registration{ready(1, 1), drains(ready(2, 1))}, found: in(ready(1, 0), ready(2, 0)), count: 3, undrain: []int32{2}, existing: 2},
		{name: "a drained one without requests stays where it is wanted again", s: decided(2, 2), registered: []registration{ready(1, 1), off}, found: in(ready(1, 0), ready(2, 0)), count: -1, undrain: []int32{2}, existing: 2},
		{name: "one that an order has named goes, and another is started", s: named, registered: []registration{ready(1, 1), off}, found: in(ready(1, 0), ready(2, 0)), count: 2, remove: []string{"b"}, existing: 2},
		{name: "one that was told to stop goes, and another is started", s: decided(2, 2), registered: []registration{ready(1, 1), off}, unlisted: true, count: 2, remove: []string{"b"}, existing: 2},
		{name: "one that hangs drains", s: hanging, registered: []registration{sick, ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: -1, drain: []string{"a"}, existing: 2},
		{name: "it does not stay where another one is wanted", s: hanging, registered: []registration{drains(sick), ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: 3, existing: 2},
		{name: "it is removed when its slots are free", s: hanging, registered: []registration{drains(withHeld(sick, 0)), ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: 2, remove: []string{"a"}, existing: 2},
		{name: "one that is unhealthy for a minute stays", s: briefly, registered: []registration{sick, ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: -1, existing: 2},
		{name: "one that was unhealthy before a time without rounds stays", s: afterGap, registered: []registration{sick, ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: -1, existing: 2},
		{name: "one that hangs stays while another one starts", s: hanging, registered: []registration{sick, starting}, found: in(ready(1, 0), starting), count: -1, existing: 2},
		{name: "one that hangs drains where another one does not become ready, as it may wait for its place", s: hanging, registered: []registration{sick, waiting}, found: in(ready(1, 0), waiting), count: -1, drain: []string{"a"}, existing: 2},
		{name: "of two that hang one drains", s: hanging, registered: []registration{sick, alsoSick}, found: in(ready(1, 0), ready(2, 0)), count: -1, drain: []string{"b"}, existing: 2},
		{name: "a drain of an operator does not end", s: decided(2, 2), registered: []registration{ready(1, 1), {ID: 2, Server: "b", Endpoint: "http://b", Draining: true, EverReady: true}}, found: in(ready(1, 0), ready(2, 0)), count: 3, existing: 2},
		{name: "what an operator drained goes when others serve in its place", s: decided(1, 2), registered: []registration{ready(1, 1), byAnna}, found: in(ready(1, 0), byAnna), count: 1, remove: []string{"b"}, existing: 2},
		{name: "it stays while its replacement starts", s: decided(1, 2), registered: []registration{unready, byAnna}, found: in(unready, byAnna), count: -1, existing: 2},
		{name: "it stays while it has a request", s: decided(1, 2), registered: []registration{ready(1, 1), withHeld(byAnna, 1)}, found: in(ready(1, 0), byAnna), count: -1, existing: 2},
		{name: "it goes where none is desired", s: decided(0, 1), registered: []registration{byAnna}, found: in(byAnna), count: 0, remove: []string{"b"}, existing: 1},
		{name: "it goes where its replacement does not come in the time of a start", s: decided(2, 2), registered: []registration{ready(1, 1), longAgo}, found: in(ready(1, 0), longAgo), count: 2, remove: []string{"b"}, existing: 2},
		{name: "it goes where there is no room for its replacement", s: retried, registered: []registration{ready(1, 1), byAnna}, found: in(ready(1, 0), byAnna), count: 1, remove: []string{"b"}, existing: 2},
		{name: "what an operator removed waits for no replacement", s: decided(2, 2), registered: []registration{ready(1, 1), removed}, found: in(ready(1, 0), removed), count: 2, remove: []string{"b"}, existing: 2},
		{name: "what did not announce itself in time is not removed: its row goes, or it announces itself again", s: decided(1, 2), registered: []registration{ready(1, 1), expired}, unlisted: true, count: 2, existing: 2},
		{name: "a successor of what an operator removed is another instance", s: namedA, registered: []registration{ready(2, 1), succeeded}, found: append(in(ready(2, 0)), successor...), count: -1, forget: []string{"a"}, existing: 2},
		{name: "one without a registration is registered", s: decided(1, 1), found: unregistered, count: -1, register: 1, existing: 1},
		{name: "one without an address only starts", s: decided(1, 1), found: noAddress, count: -1, existing: 1},
		{name: "one without an address has no request: it is removed at once", s: decided(0, 1), found: noAddress, count: 0, remove: []string{"a"}, existing: 1},
		{name: "one that is gone is forgotten", s: decided(1, 1), registered: []registration{ready(1, 0), ready(2, 0)}, found: in(ready(2, 0)), count: -1, forget: []string{"a"}, existing: 1},
		{name: "one that is gone with slots held is drained", s: decided(1, 1), registered: []registration{ready(1, 2), ready(2, 0)}, found: in(ready(2, 0)), count: -1, drain: []string{"a"}, existing: 1},
		{name: "a start that failed is removed, and none is begun now", s: decided(1, 1), found: failed, count: 0, remove: []string{"a"}, existing: 1, fails: 1},
		{name: "none is begun before the next try", s: blocked, registered: []registration{ready(1, 0)}, found: in(ready(1, 0)), count: -1, existing: 1},
		{name: "one that ends is not counted", s: decided(1, 1), found: ending, count: 1, existing: 0},
		{name: "one that ends is forgotten once no slot of it is held", s: decided(1, 1), registered: []registration{ready(1, 0)}, found: ending, count: 1, forget: []string{"a"}, existing: 0},
		{name: "a successor under the same name is another instance", s: decided(1, 1), registered: []registration{drains(ready(1, 0))}, found: successor, count: -1, forget: []string{"a"}, existing: 1},
		{name: "it waits for the slots of its predecessor", s: decided(1, 1), registered: []registration{withHeld(drains(ready(1, 0)), 1)}, found: successor, count: -1, existing: 1},
		{name: "one that ends gets no more requests", s: decided(1, 1), registered: []registration{ready(1, 1)}, found: ending, count: 1, drain: []string{"a"}, existing: 0},
		{name: "a stuck start drains first", s: stuck, registered: []registration{old}, found: in(old), count: -1, drain: []string{"a"}, existing: 1},
		{name: "a stuck start that drains is replaced", s: stuck, registered: []registration{drains(old)}, found: in(old), count: 1, remove: []string{"a"}, existing: 1},
		{name: "a stuck start that is not registered is replaced", s: stuck, found: noAddress, count: 1, remove: []string{"a"}, existing: 1},
		{name: "one that failed with a slot held stays until its slots are free", s: decided(1, 1), registered: []registration{ready(1, 1)}, found: failed, count: -1, drain: []string{"a"}, existing: 1, fails: 1},
		{name: "another template: one more first", s: decided(1, 1), registered: []registration{outdated}, found: in(outdated), count: 2, existing: 1},
		{name: "another template: the old one drains when the new one is ready", s: decided(1, 2), registered: []registration{outdated, ready(2, 0)}, found: in(outdated, ready(2, 0)), count: -1, drain: []string{"a"}, existing: 2},
		{name: "another template and no room: the old one drains first", s: full, registered: []registration{outdated}, found: in(outdated), count: -1, drain: []string{"a"}, existing: 1},
		{name: "another template and no room: none is started while it drains", s: full, registered: []registration{drains(withHeld(outdated, 1))}, found: in(outdated), count: -1, existing: 1},
		{name: "another template and no room: none is started in the order that removes it", s: full, registered: []registration{drains(outdated)}, found: in(outdated), count: 0, remove: []string{"a"}, existing: 1},
		{name: "another template and no room: none is started while it ends", s: full, found: ending0, count: 0, existing: 0},
		{name: "another template and no room: the new one is started when it is gone", s: full, count: 1, existing: 0},
		{name: "another template at the maximum: the old one drains first", s: bounded, registered: []registration{outdated}, found: in(outdated), count: -1, drain: []string{"a"}, existing: 1},
		{name: "another template, no room for growth either: an old one drains", s: retried, registered: []registration{outdated}, found: in(outdated), count: -1, drain: []string{"a"}, existing: 1},
		{name: "disabled", s: disabled, registered: []registration{ready(1, 0), ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: -1, existing: 2},
		{name: "not decided yet", s: undecided, registered: []registration{ready(1, 0), ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: -1, existing: 2},
		{name: "off everywhere", s: anywhere, registered: []registration{ready(1, 0), ready(2, 0)}, found: in(ready(1, 0), ready(2, 0)), count: -1, existing: 2},
		{name: "unlisted: all that is registered exists", s: decided(3, 3), registered: []registration{ready(1, 0)}, unlisted: true, count: 3, existing: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := plan(c.s, c.registered, c.found, !c.unlisted, noon)
			count, remove := -1, []string(nil)
			if got.order != nil {
				count, remove = got.order.Count, got.order.Remove
			}
			if count != c.count || !slices.Equal(remove, c.remove) {
				t.Errorf("order of %d, without %v, want %d, %v", count, remove, c.count, c.remove)
			}
			if len(got.register) != c.register || !slices.Equal(got.drain, c.drain) || !slices.Equal(got.forget, c.forget) ||
				!slices.Equal(got.undrain, c.undrain) || got.existing != c.existing || got.failed != c.fails {
				t.Errorf("%+v", got)
			}
		})
	}
}

// Of instances with calls those go first whose calls end soonest, of idle ones those that have loaded least.
func TestPlanDrainsWhatIsInUseLeast(t *testing.T) {
	long, short, warm, cold := ready(1, 1), ready(2, 2), ready(3, 0), ready(4, 0)
	long.remaining, short.remaining = time.Hour, time.Second
	warm.affinity = 0.5
	registered := []registration{long, short, warm, cold}
	want := []string{"d", "c", "b", "a"}
	for desired := range len(registered) {
		got := plan(decided(desired, 4), registered, in(registered...), true, noon)
		if !slices.Equal(got.drain, want[:len(want)-desired]) {
			t.Errorf("with %d desired %v drain, want %v", desired, got.drain, want[:len(want)-desired])
		}
	}
}

// Reports of task nodes and gateways are read where an instance is to be given up. What cannot be read tells nothing.
func TestTheInstanceWhoseCallsEndSoonestIsGivenUp(t *testing.T) {
	db := fleet(t)
	c := &cluster{}
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "local", "target": {"command": "x"}}')`)
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 3)
	w.round()
	w.round()
	do(t, db, `UPDATE penstock.instance SET state = 'ready', ready_at = clock_timestamp()`)
	do(t, db, `SELECT penstock.register_gateway(7, 'g', 'default', '1 hour'), penstock.register_gateway(8, 'broken', 'default', '1 hour')`)
	do(t, db, `INSERT INTO penstock.node (id, name, application, lease, threads, queue_ids) VALUES (9, 'n', 'default', '1h', 1, '{}')`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id) SELECT id, 0, id, 9 FROM penstock.instance`)
	report := func(node int, path, server string, ms int) {
		do(t, db, `UPDATE penstock.node SET load = jsonb_set('{"instances": null, "pools": {"llama": {}}}', $2::text[], jsonb_build_array(jsonb_build_object(
		           'id', (SELECT id FROM penstock.instance WHERE server = $3), 'in_flight', 1, 'remaining_ms', $4::int)))
		            WHERE id = $1`, node, path, server, ms)
	}
	report(9, "{instances}", "gpu-1", 60_000)
	report(7, "{pools,llama,instances}", "gpu-3", 90_000)
	do(t, db, `UPDATE penstock.node SET load = '{"pools": {"llama": {"instances": [{"id": "x"}]}}}' WHERE id = 8`)
	rows := []registration{}
	for i, r := range c.names() {
		rows = append(rows, registration{ID: one[int32](t, db, `SELECT id FROM penstock.instance WHERE server = $1`, r), Server: fmt.Sprint(i)})
	}
	if err := w.duty.applier.readUsage(t.Context(), "llama", rows); err != nil {
		t.Fatal(err)
	}
	if rows[0].remaining != time.Minute || rows[1].remaining != 0 || rows[2].remaining != 90*time.Second {
		t.Errorf("the calls take another %v, %v and %v", rows[0].remaining, rows[1].remaining, rows[2].remaining)
	}
	for n, want := range map[int]string{2: "gpu-2", 1: "gpu-1,gpu-2"} {
		do(t, db, `UPDATE penstock.instance SET draining_at = NULL, drain_by = NULL`)
		override(t, db, n)
		w.round()
		w.round()
		got := one[string](t, db, `SELECT coalesce(string_agg(server, ',' ORDER BY server), '') FROM penstock.instance WHERE draining_at IS NOT NULL`)
		if got != want {
			t.Errorf("with %d desired %q drain, want %s", n, got, want)
		}
	}
}

// However a deployment came to its state, a step never stops an instance that may have a request: one that is
// registered was drained in an earlier round, or its backend found it ended, and no slot of it is held.
func TestUnracedPlanStopsNothingThatRuns(t *testing.T) {
	const bits = 6
	replace := began(10 * time.Minute)
	for seed := 0; seed < 1<<(3*bits); seed += 5 { // each pair of members comes in all states
		var registered []registration
		found := map[string]*BackendInstance{}
		exact := true // no start is replaced
		for id := range int32(3) {
			b := seed >> (bits * id)
			r := ready(id+1, b&1)
			if b&2 != 0 {
				r = drains(r)
			}
			if b&4 != 0 {
				r.TemplateHash = "t0"
			}
			if b&8 != 0 { // a stuck start, as far as the rows tell
				r.Ready, r.EverReady, exact = false, false, false
			}
			registered = append(registered, r)
			if b&16 == 0 || b&32 != 0 {
				i := in(r)[0]
				if b&16 != 0 {
					i.State, exact = InstanceFailed, false
				}
				found[r.Server] = &i
			}
		}
		var list []BackendInstance
		for _, r := range registered {
			if i := found[r.Server]; i != nil {
				list = append(list, *i)
			}
		}
		for desired := range 4 {
			s := decided(desired, 3)
			s.ReplaceBefore = &replace
			for _, listed := range []bool{true, false} {
				reported := list
				if !listed {
					reported = nil
				}
				got := plan(s, registered, reported, listed, noon)
				if got.order == nil {
					continue
				}
				for _, name := range got.order.Remove {
					r := registered[name[0]-'a']
					ended := listed && found[name] != nil && found[name].State == InstanceFailed
					if r.Held > 0 || !r.Draining && !ended {
						t.Fatalf("seed %d, %d desired: %s is removed: %+v", seed, desired, name, r)
					}
				}
				busy := 0
				for _, r := range registered {
					if !listed || found[r.Server] != nil {
						busy += r.Held
					}
				}
				if got.order.Count < busy || exact && got.order.Count < desired {
					t.Fatalf("seed %d: %d desired, %d run, and %d are to exist", seed, desired, busy, got.order.Count)
				}
			}
		}
	}
}

// A deployment that was removed and made again, or restored, begins at order 0: receivers have seen later ones.
func TestOrdersGrowWithTheClock(t *testing.T) {
	fresh := decided(1, 0)
	fresh.OrderID, fresh.AppliedID = 0, 0
	first := plan(fresh, nil, nil, true, noon).order
	if first == nil || first.ID < noon.UnixMilli() {
		t.Fatalf("the first order is %+v", first)
	}
	ahead := decided(1, 0)
	ahead.OrderID = noon.UnixMilli() + 1000
	if next := plan(ahead, nil, nil, true, noon).order; next == nil || next.ID != ahead.OrderID+1 {
		t.Errorf("after order %d comes %+v", ahead.OrderID, next)
	}
}

func TestFloorsHoldWhileTheyLast(t *testing.T) {
	floors := []Floor{
		{Cron: "0 8 * * MON-FRI", Zone: "Europe/Berlin", Lasts: Seconds(10 * time.Hour), Min: 3},
		{Cron: "30 11 * * *", Lasts: Seconds(time.Hour), Min: 5},
	}
	for at, want := range map[string]int{
		"2026-01-01T06:59:59Z": 0, "2026-01-01T07:00:00Z": 3, "2026-01-01T11:30:00Z": 5, "2026-01-01T12:30:01Z": 3,
		"2026-01-01T17:00:01Z": 0, "2026-01-03T09:00:00Z": 0,
	} {
		now, err := time.Parse(time.RFC3339, at)
		if err != nil {
			t.Fatal(err)
		}
		if got := floorAt(floors, now); got != want {
			t.Errorf("at %s the floor is %d, want %d", at, got, want)
		}
	}
	for _, f := range []Floor{{Cron: "x", Lasts: 1, Min: 1}, {Cron: "* * * * *", Min: 1}, {Cron: "* * * * *", Lasts: 1}, {Cron: "* * * * *", Zone: "Mars", Lasts: 1, Min: 1}} {
		if (Policy{Floors: []Floor{f}}).Check() == nil {
			t.Errorf("%+v was accepted", f)
		}
	}
}

// A Deployment replaces its pods by itself, with one more than was ordered for a time. That one is its own to give up: were it
// named for removal, its ReplicaSet would start it again each time.
func TestARollingUpdateOfTheBackendGoesToItsEnd(t *testing.T) {
	old := []registration{ready(1, 0), ready(2, 0), ready(3, 0)}
	found := in(old...)
	for i := range found {
		found[i].Revision = "r1"
	}
	fresh := BackendInstance{Name: "d", Began: began(time.Minute), State: InstanceRunning, Revision: "r2"}
	s := decided(3, 3)
	for name, endpoint := range map[string]string{"it starts": "", "it is ready": "http://d"} {
		fresh.Endpoint = endpoint
		todo := plan(s, old, append(slices.Clone(found), fresh), true, noon)
		if todo.order != nil || len(todo.drain) > 0 {
			t.Errorf("%s: %d are drained, the order is %+v", name, len(todo.drain), todo.order)
		}
		if (endpoint != "") != (len(todo.register) == 1) {
			t.Errorf("%s: %d are registered", name, len(todo.register))
		}
	}
	fresh.Endpoint, s.Desired = "", 2
	if todo := plan(s, old, append(slices.Clone(found), fresh), true, noon); len(todo.drain) != 1 {
		t.Errorf("one fewer is desired: %v are drained", todo.drain)
	}
	fresh.Revision = "r1" // something else has started it
	s.Desired = 3
	if todo := plan(s, old, append(slices.Clone(found), fresh), true, noon); todo.order == nil || !slices.Equal(todo.order.Remove, []string{"d"}) {
		t.Errorf("one too many without an update: the order is %+v", todo.order)
	}
}

// An instance that an order has named goes with that order, and is no surplus of the update: no other one goes in its place.
func TestNoOtherInstanceGoesWhileANamedOneEnds(t *testing.T) {
	revisions := func(found []BackendInstance) []BackendInstance {
		for i := range found {
			found[i].Revision = []string{"r1", "r2"}[i%2]
		}
		return found
	}
	s := decided(3, 5)
	rows := []registration{drains(ready(1, 0)), drains(ready(2, 1)), ready(3, 1), ready(4, 1), ready(5, 1)}
	found := revisions(in(rows...))
	first := plan(s, rows, found, true, noon)
	if first.order == nil || first.order.Count != 4 || !slices.Equal(first.order.Remove, []string{"a"}) {
		t.Fatalf("the first order is %+v", first.order)
	}
	s.Ordered, s.Removing = 4, []string{"a"}
	again := plan(s, rows, found, true, noon)
	if again.order == nil || again.order.Count != 4 || len(again.undrain) > 0 || len(again.drain) > 0 {
		t.Errorf("a still exists: %v drain, %v drain no more, the order is %+v", again.drain, again.undrain, again.order)
	}
	named, fresh := in(ready(6, 0))[0], in(ready(7, 0))[0] // neither is registered, and the backend has started one more
	named.Endpoint = ""
	s.Removing = []string{"f"}
	again = plan(s, rows[1:], revisions(append(in(rows[1:]...), named, fresh)), true, noon)
	if again.order == nil || again.order.Count != 4 || !slices.Equal(again.order.Remove, []string{"f"}) || len(again.drain) > 0 {
		t.Errorf("f still exists: %v drain, the order is %+v", again.drain, again.order)
	}
}

func TestTheMessageOfAFailedStartIsOneLine(t *testing.T) {
	failed := in(ready(1, 0))
	failed[0].State, failed[0].Message = InstanceFailed, "exit status 1:\n\tout of memory"+strings.Repeat("x", 2*messageMax)
	message := plan(decided(1, 1), nil, failed, true, noon).message
	text, began := strings.CutPrefix(message, "start failed: ")
	if strings.ContainsAny(message, "\n\t") || len(text) > messageMax+3 || !began {
		t.Errorf("the message is %q", message)
	}
}

// A worker that announces itself chooses its name.
func TestTheMessageAboutAnInstanceThatStaysIsOneLine(t *testing.T) {
	const name = "a\x1b[31m\u009b\nb"
	s := decided(0, 0)
	s.Removing, s.RemovingSince = []string{name}, map[string]time.Time{name: began(time.Hour)}
	stays := drains(ready(1, 0))
	stays.Server = name
	overdue := plan(s, []registration{stays}, nil, false, noon).overdue
	if !strings.HasPrefix(overdue, "instance a\ufffd[31m\ufffd b is to go") {
		t.Errorf("the message is %q", overdue)
	}
}

// One that the database refuses is a start that may be stuck. It is removed then, as none that is registered would be.
func TestAnInstanceThatCannotBeRegisteredIsNoCapacityForEver(t *testing.T) {
	s := decided(1, 1)
	s.refused = map[string]refusal{"a": {}}
	old := began(10 * time.Minute)
	todo := plan(s, nil, in(ready(1, 0)), true, noon)
	if len(todo.register) != 1 || len(todo.starting) != 1 || todo.order != nil {
		t.Errorf("%d are registered, %d start, the order is %+v", len(todo.register), len(todo.starting), todo.order)
	}
	s.ReplaceBefore = &old
	if todo := plan(s, nil, in(ready(1, 0)), true, noon); todo.order == nil || !slices.Equal(todo.order.Remove, []string{"a"}) || len(todo.drain) > 0 {
		t.Errorf("stuck: %v are drained, the order is %+v", todo.drain, todo.order)
	}
}

// One that the database refused is not tried again in the round that removes it. Its refusal is known in the next one: it is
// removed then, too, and not drained.
func TestAnInstanceIsNotRegisteredWhileItIsRemoved(t *testing.T) {
	old := began(10 * time.Minute)
	stuck := decided(1, 1)
	stuck.ReplaceBefore = &old
	for name, s := range map[string]applied{"one fewer": decided(0, 1), "stuck": stuck} {
		s.refused = map[string]refusal{"a": {n: 3, message: "refused"}}
		for range 2 {
			todo := plan(s, nil, in(ready(1, 0)), true, noon)
			if todo.order == nil || !slices.Equal(todo.order.Remove, []string{"a"}) || len(todo.register)+len(todo.drain) > 0 {
				t.Errorf("%s: %d are registered, %v drain, the order is %+v", name, len(todo.register), todo.drain, todo.order)
			}
			if todo.paused["a"].n != 3 || todo.refusal() != "refused" {
				t.Errorf("%s: the refusal is not kept: %+v", name, todo.paused)
			}
			s.Removing, s.refused = []string{"a"}, todo.paused
		}
	}
}

// A daily floor begins after the gap on the day on which the clocks go forward over its beginning, and once where they go back.
func TestFloorsFollowClockChanges(t *testing.T) {
	daily := []Floor{{Cron: "30 2 * * *", Zone: "Europe/Berlin", Lasts: Seconds(30 * time.Minute), Min: 3}}
	for at, want := range map[string]int{
		"2026-03-29T00:59:59Z": 0, "2026-03-29T01:00:00Z": 3, "2026-03-29T01:29:59Z": 3, "2026-03-29T01:31:00Z": 0, // 2:00 is 3:00
		"2026-10-25T00:29:59Z": 0, "2026-10-25T00:30:00Z": 3, "2026-10-25T01:30:00Z": 0, "2026-10-25T01:45:00Z": 0, // 3:00 is 2:00
	} {
		now, err := time.Parse(time.RFC3339, at)
		if err != nil {
			t.Fatal(err)
		}
		if got := floorAt(daily, now); got != want {
			t.Errorf("at %s the floor is %d, want %d", at, got, want)
		}
	}
}
