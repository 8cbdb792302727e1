package scale

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// host is a backend of several deployments that use the same devices.
type host struct {
	mu      sync.Mutex
	all     map[string][]BackendInstance
	devices int
	started int
}

func (h *host) List(_ context.Context, d BackendTarget) ([]BackendInstance, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.all[d.Name]), nil
}

func (h *host) Apply(_ context.Context, o Order) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	used := 0
	h.all[o.Name] = slices.DeleteFunc(h.all[o.Name], func(i BackendInstance) bool { return slices.Contains(o.Remove, i.Name) })
	for _, instances := range h.all {
		used += len(instances)
	}
	for ; len(h.all[o.Name]) < o.Count; used++ {
		if used == h.devices {
			return fmt.Errorf("all %d devices are in use: %w", h.devices, ErrNoRoom)
		}
		h.started++
		name := fmt.Sprintf("%s-%d", o.Name, h.started)
		h.all[o.Name] = append(h.all[o.Name], BackendInstance{
			Name: name, Endpoint: "http://" + name, Began: time.Now(), State: InstanceRunning, TemplateHash: o.TemplateHash,
		})
	}
	return nil
}

// An instance goes to a deployment that is filled before its own where there is room for one of the two alone.
func TestTheFirstDeploymentGetsTheOnlyDevice(t *testing.T) {
	for name, c := range map[string]struct {
		devices int
		budget  string
	}{"one device": {1, "null"}, "a budget for one": {9, "1"}} {
		t.Run(name, func(t *testing.T) {
			db := fleet(t)
			h := &host{all: map[string][]BackendInstance{}, devices: c.devices}
			w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: h}})}
			deploy := func(name string, order int) {
				do(t, db, `SELECT penstock.set_deployment($1, 'llama', jsonb_build_object('backend', 'local', 'fill_order', $2::int,
				           'policy', '{"slots": 2, "max": 8}'::jsonb))`, name, order)
			}
			rounds := func(n int) {
				for range n {
					w.round()
					do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
					do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
				}
			}
			do(t, db, `SELECT penstock.set_scale_setting('scale.budget', $1)`, c.budget)
			deploy("llama-own", 1)
			w.round()
			push(t, db, 1)
			rounds(4)
			if n := len(h.all["llama-own"]); n != 1 {
				t.Fatalf("%d instances at first", n)
			}
			deploy("llama-new", 0)
			for range 12 {
				rounds(1)
				const otherKind = `SELECT count(*) FROM penstock.deployment_state WHERE strpos(error, $1) > 0 AND error_kind <> 'no room'`
				if n := one[int](t, db, otherKind, ErrNoRoom.Error()); n != 0 {
					t.Fatal("a backend had no room, and the error is of another kind")
				}
			}
			if n, left := len(h.all["llama-new"]), len(h.all["llama-own"]); n != 1 || left != 0 {
				t.Errorf("%d instances of the first deployment, %d of the second", n, left)
			}
			if n := one[int](t, db, `SELECT desired FROM penstock.scale_state`); n != 1 {
				t.Errorf("%d are recorded as desired", n)
			}
		})
	}
}

// The starts of the deployment that is filled first fail. Its tries take nothing from the one behind it until one is
// ready, under each leader, and there is one at a time.
func TestATryTakesNothingFromTheNextDeployment(t *testing.T) {
	failed, soon, past := noon.Add(-time.Minute), noon.Add(time.Second), noon.Add(-time.Second)
	spot := deploymentRow{Name: "spot", Mode: "full", Backend: backendLocal, Failures: blockedAfter, FailedAt: &failed, SeenAt: &noon, Registered: 1, Ready: 1}
	external := deploymentRow{
		Name: "external", FillOrder: 1, Mode: "full", Backend: backendWebhook, Desired: 2, Registered: 2, Ready: 2,
	}
	for _, c := range []struct {
		name           string
		change         func(*deploymentRow)
		spot, external int
	}{
		{"it waits", func(s *deploymentRow) { s.RetryAt = &soon }, 1, 3},
		{"it is tried", func(s *deploymentRow) { s.RetryAt = &past }, 2, 3},
		{"the try starts", func(s *deploymentRow) { s.RetryAt, s.Starting = &past, []time.Time{noon} }, 2, 3},
		{"the try is registered", func(s *deploymentRow) {
			s.RetryAt, s.NotReady, s.Registered = &past, []time.Time{noon}, 2
		}, 2, 3},
		{"starts from before the failure stay", func(s *deploymentRow) {
			s.RetryAt, s.Starting = &soon, []time.Time{failed.Add(-time.Second)}
		}, 2, 2},
		{"stuck starts do not", func(s *deploymentRow) {
			s.RetryAt, s.Starting = &soon, []time.Time{failed.Add(-time.Hour)}
		}, 1, 3},
		{"it has no room", func(s *deploymentRow) { s.Failures, s.NoRoomAt, s.RetryAt = 0, &failed, &soon }, 1, 3},
		{"it is ready", func(s *deploymentRow) { s.Failures, s.Ready, s.Registered = 0, 2, 2 }, 4, 2},
		{"all are ready", func(s *deploymentRow) { s.Failures, s.Ready, s.Registered = 0, 4, 4 }, 4, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := spot
			c.change(&s)
			if got := divideAmong(4, []deploymentRow{s, external}, noon); got["spot"] != c.spot || got["external"] != c.external {
				t.Errorf("got %v, want %d and %d", got, c.spot, c.external)
			}
		})
	}
}

// A deployment that was made cheaper takes the place of another one as its instances become ready, and no sooner.
func TestADeploymentGivesUpNoReadyInstanceForOneThatIsNotReady(t *testing.T) {
	own := deploymentRow{Name: "own", Cost: 1, Mode: "full", Backend: backendWebhook, Desired: 10, Ready: 10}
	spot := deploymentRow{Name: "spot", Cost: 0.3, Mode: "full", Backend: backendWebhook}
	dear := deploymentRow{Name: "dear", Cost: 2, Mode: "full", Backend: backendWebhook, Desired: 3, Ready: 3}
	manual := deploymentRow{Name: "manual", Cost: 3, Mode: "manual", Backend: backendWebhook, Desired: 4, Ready: 4}
	with := func(s deploymentRow, change func(*deploymentRow)) deploymentRow { change(&s); return s }
	for name, c := range map[string]struct {
		n           int
		deployments []deploymentRow
		want        map[string]int
	}{
		"none is ready": {10, []deploymentRow{spot, own}, map[string]int{"spot": 10, "own": 10}},
		"four are ready": {10, []deploymentRow{
			with(spot, func(s *deploymentRow) { s.Desired, s.Ready = 10, 4 }), own,
		}, map[string]int{"spot": 10, "own": 6}},
		"all are ready": {10, []deploymentRow{
			with(spot, func(s *deploymentRow) { s.Desired, s.Ready = 10, 10 }), own,
		}, map[string]int{"spot": 10, "own": 0}},
		"fewer are wanted":  {6, []deploymentRow{spot, own}, map[string]int{"spot": 6, "own": 6}},
		"the dearest first": {10, []deploymentRow{spot, own, dear}, map[string]int{"spot": 10, "own": 10, "dear": 0}},
		"one that does not change serves, too": {
			10, []deploymentRow{spot, own, manual}, map[string]int{"spot": 6, "own": 6, "manual": 4},
		},
		"one that drains does not come back": {
			10, []deploymentRow{spot, with(own, func(s *deploymentRow) { s.Desired = 2 })}, map[string]int{"spot": 10, "own": 2},
		},
		"not above the maximum": {
			10, []deploymentRow{spot, with(own, func(s *deploymentRow) { s.policy.Max = 3 })}, map[string]int{"spot": 10, "own": 3},
		},
		"its devices are those of the other": {10, []deploymentRow{
			with(spot, func(s *deploymentRow) { s.ErrorKind = noRoomError }), own,
		}, map[string]int{"spot": 10, "own": 0}},
		"the words of its webhook are no kind of error": {10, []deploymentRow{
			with(spot, func(s *deploymentRow) { s.Error = "status 500: " + ErrNoRoom.Error() }), own,
		}, map[string]int{"spot": 10, "own": 10}},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range c.deployments {
				c.deployments[i].policy.Mode = Mode(c.deployments[i].Mode)
			}
			if got := divideAmong(c.n, c.deployments, noon); !maps.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

// A minimum by a schedule is one of its deployment: it gets that share, and the model the sum of all.
func TestEachOfSeveralDeploymentsHasItsFloor(t *testing.T) {
	floor := func(n int) []Floor { return []Floor{{Cron: "* * * * *", Lasts: Seconds(time.Hour), Min: n}} }
	own := deploymentRow{Name: "own", Mode: "full", Backend: backendWebhook, policy: Policy{Min: 2, Max: 10}}
	spot := deploymentRow{Name: "spot", FillOrder: 1, Mode: "full", Backend: backendWebhook, policy: Policy{Max: 10, Floors: floor(3)}}
	all := []deploymentRow{own, spot}
	if n := floorOf(all, noon); n != 5 {
		t.Errorf("the floor of the model is %d, want 5", n)
	}
	if got := divideAmong(5, all, noon); got["own"] != 2 || got["spot"] != 3 {
		t.Errorf("got %v, want 2 and 3", got)
	}
	all[0].policy.Floors = floor(4)
	if n := floorOf(all, noon); n != 7 {
		t.Errorf("with a floor of both it is %d, want 7", n)
	}
	if n := floorOf([]deploymentRow{own}, noon); n != 0 {
		t.Errorf("without a schedule it is %d", n)
	}
}

// The caps hold for each of several deployments, and for what an operator set.
func TestCapsHoldForEachDeployment(t *testing.T) {
	later, hundred := noon.Add(time.Hour), 100
	a := deploymentRow{Name: "a", Mode: "full", Backend: backendWebhook}
	b := deploymentRow{Name: "b", FillOrder: 1, Mode: "full", Backend: backendWebhook, Override: &hundred, OverrideUntil: &later}
	a.policy.Max, b.policy.Max = 10, 10
	for name, change := range map[string]func(*deploymentRow){
		"emergency_max": func(s *deploymentRow) { s.policy.EmergencyMax = 5 },
		"scale.max_all": func(s *deploymentRow) { s.MaxAll = 5 },
	} {
		deployments := []deploymentRow{a, b}
		change(&deployments[0])
		change(&deployments[1])
		if got := divideAmong(20, deployments, noon); got["a"] != 5 || got["b"] != 5 {
			t.Errorf("%s of 5: %v", name, got)
		}
	}
}

// A cap binds each deployment, and a model of several by their sum: the cap of the first one is no bound of the others.
func TestTheCapOfADeploymentBindsNoOtherOne(t *testing.T) {
	capped := func(most int) deploymentRow {
		return deploymentRow{Name: fmt.Sprint("capped", most), policy: Policy{Max: 10, EmergencyMax: most}}
	}
	for name, c := range map[string]struct {
		deployments []deploymentRow
		all         int
		want        int // 100 are wanted
	}{
		"one":              {[]deploymentRow{capped(1)}, 0, 1},
		"the first of two": {[]deploymentRow{capped(1), capped(0)}, 0, 20},
		"the last of two":  {[]deploymentRow{capped(0), capped(1)}, 0, 20},
		"both":             {[]deploymentRow{capped(1), capped(3)}, 0, 4},
		"max_all of one":   {[]deploymentRow{capped(0)}, 3, 3},
		"max_all of two":   {[]deploymentRow{capped(0), capped(0)}, 3, 6},
	} {
		o := input{MaxAll: c.all}.observe(used{}, c.deployments, 0)
		maker := decider{p: policyOf(c.deployments), o: o, d: Decision{Desired: 100}}
		if maker.bound(); maker.d.Desired != c.want {
			t.Errorf("%s: %d of 100, want %d", name, maker.d.Desired, c.want)
		}
	}
}

// A deployment whose backend does not answer any more keeps its number, and the others of its model make up for the
// instances of it that do not serve. An operator's number and the caps hold for it too.
func TestADeploymentThatIsNotReportedIsHeld(t *testing.T) {
	lately, before := noon.Add(-time.Second), noon.Add(-time.Hour)
	own := deploymentRow{Name: "own", Mode: "full", Backend: backendKubernetes, Desired: 2, SeenAt: &before, Ready: 2, Registered: 2}
	spot := deploymentRow{Name: "spot", FillOrder: 1, Mode: "full", Backend: backendLocal, Desired: 1, SeenAt: &lately}
	typo := deploymentRow{Name: "typo", FillOrder: -1, Mode: "full", Backend: backendKubernetes}
	all := []deploymentRow{typo, own, spot}
	for n, want := range map[int]map[string]int{
		5: {"typo": 0, "own": 2, "spot": 3}, 1: {"typo": 0, "own": 2, "spot": 0},
	} {
		if got := divideAmong(n, all, noon); !maps.Equal(got, want) {
			t.Errorf("%d instances are %v, want %v", n, got, want)
		}
	}
	long, none, later := noon.Add(-time.Hour), 0, noon.Add(time.Hour)
	for name, c := range map[string]struct {
		change    func(*deploymentRow)
		own, spot int
	}{
		"none of it is registered":    {func(*deploymentRow) {}, 2, 5},
		"one is ready":                {func(s *deploymentRow) { s.Ready, s.Registered = 1, 1 }, 2, 4},
		"one starts":                  {func(s *deploymentRow) { s.NotReady, s.Registered = []time.Time{lately}, 1 }, 2, 4},
		"one has started for an hour": {func(s *deploymentRow) { s.NotReady, s.Registered = []time.Time{long}, 1 }, 2, 5},
		"more are ready than desired": {func(s *deploymentRow) { s.Ready, s.Registered = 4, 4 }, 2, 3},
		"its starts fail":             {func(s *deploymentRow) { s.Failures, s.FailedAt = blockedAfter, &long }, 2, 5},
		"an override of 0":            {func(s *deploymentRow) { s.Override, s.OverrideUntil = &none, &later }, 0, 5},
		"a cap":                       {func(s *deploymentRow) { s.MaxAll, s.Ready = 1, 2 }, 1, 4},
	} {
		away := deploymentRow{Name: "own", Mode: "full", Backend: backendKubernetes, Desired: 2, SeenAt: &before}
		c.change(&away)
		if got := divideAmong(5, []deploymentRow{away, spot}, noon); got["own"] != c.own || got["spot"] != c.spot {
			t.Errorf("%s: %v, want %d and %d", name, got, c.own, c.spot)
		}
	}
	if age := instancesAge(all, noon); age != 0 {
		t.Errorf("the newest report is %v old", time.Duration(age))
	}
	if age := instancesAge(all[:2], noon); time.Duration(age) < 59*time.Minute {
		t.Errorf("the newest report is %v old", time.Duration(age))
	}
}

// Pods of the deployment that is filled first stay pending. After three replacements the next one gets their number, and
// keeps it until a start of the first one is ready.
func TestStartsThatAreStuckBringInTheNextDeployment(t *testing.T) {
	spot := deploymentRow{Name: "spot", Mode: "full", Backend: backendKubernetes}
	external := deploymentRow{Name: "external", FillOrder: 1, Mode: "full", Backend: backendWebhook}
	spot.policy.Slots, external.policy.Slots = 2, 2
	deployments := []deploymentRow{spot, external}
	const pending, end = 100 * 60, 150 * 60
	now, s := noon, State{At: noon, Counted: noon, Desired: 3, WasReady: noon}
	var starts []time.Time
	asked, lost, ready := 0, 0, 0
	for second := range end {
		now = now.Add(time.Second)
		for second > pending && len(starts) > 0 && now.Sub(starts[0]) > time.Minute {
			starts, ready = starts[1:], ready+1
		}
		first, next := &deployments[0], &deployments[1]
		starts = append([]time.Time{}, starts[:min(len(starts), max(0, first.Desired-ready))]...)
		for ready+len(starts) < first.Desired {
			starts = append(starts, now)
		}
		first.NotReady, first.Registered, first.Ready, first.SeenAt = starts, ready+len(starts), ready, &now
		next.Ready, next.Registered = next.Desired, next.Desired
		o := Obs{
			Waiting: 50, Arrived: 1, Running: 2 * (ready + next.Ready), Service: 10, ColdStart: 60, ColdStartP95: 90, LastRequest: now,
			Ready: ready + next.Ready, Starting: starts,
			Deployments: []DeploymentStarts{{Name: "spot", Ready: ready, Starting: starts}, {Name: "external", Ready: next.Ready}},
		}
		var d Decision
		d, s = Decide(now, policyOf(deployments), o, s)
		if d.Replace > 0 {
			starts = nil
		}
		parts, _ := shares(d.Desired, 0, deployments, modelStarts{stuck: s.Stuck}, now)
		if asked == 0 && parts["external"] > 0 {
			asked = second
		}
		if asked > 0 && second < pending && parts["external"] < next.Desired && d.Desired >= d.Current {
			lost++
		}
		first.Desired, next.Desired = parts["spot"], parts["external"]
	}
	if asked == 0 || asked > 60*60 {
		t.Errorf("the next deployment was asked after %d s", asked)
	}
	if lost > 0 {
		t.Errorf("it lost instances %d times to starts that are not ready", lost)
	}
	if ready < 5 || deployments[1].Desired > 10-ready+10 {
		t.Errorf("%d are ready at last, the next deployment has %d", ready, deployments[1].Desired)
	}
}

// The number that an override sets for a deployment whose mode permits no change is published as it is: the budget
// takes nothing of it, and adds nothing.
func TestAnOverrideOfAnAdvisedDeploymentHoldsUnderABudget(t *testing.T) {
	now := time.Now()
	later := now.Add(time.Hour)
	for _, mode := range []Mode{Advise, Disabled} {
		for _, c := range []struct {
			override         int
			budget           float64
			a, b, desired    int
			notes, wantedOfA int
		}{
			{override: 0, budget: 1000, a: 1, b: 0, desired: 1, wantedOfA: 1},
			{override: 5, budget: 1000, a: 1, b: 5, desired: 6, wantedOfA: 1},
			{override: 5, budget: 7, a: 2, b: 5, desired: 7, wantedOfA: 4, notes: 1},
		} {
			deployments := []deploymentRow{
				{Name: "a", Model: "m", Cost: 1, Mode: Full, Backend: backendKEDA, Desired: 1, Ready: 1},
				{
					Name: "b", Model: "m", Cost: 1, FillOrder: 1, Mode: mode, Backend: backendKEDA, Desired: 3, Ready: 3,
					Override: &c.override, OverrideUntil: &later,
				},
			}
			for i := range deployments {
				deployments[i].policy.Mode, deployments[i].policy.Max = Mode(deployments[i].Mode), 5
			}
			n := c.override + c.wantedOfA
			v := &modelDecision{in: input{Model: "m", Budget: c.budget, At: now}, deployments: deployments, parts: divideAmong(n, deployments, now)}
			v.Desired, v.Apply = n, true
			limitByBudget([]*modelDecision{v}, map[string][]deploymentRow{"m": deployments})
			if v.parts["a"] != c.a || v.parts["b"] != c.b || v.Desired != c.desired || len(v.Notes) != c.notes {
				t.Errorf("%s, override %d, budget %v: %v, desired %d, notes %v", mode, c.override, c.budget, v.parts, v.Desired, v.Notes)
			}
		}
	}
}

// What a deployment has whose backend does not report is not known: the budget counts all that it may have, and takes none of
// it, since nothing would become free for others.
func TestTheBudgetHoldsWhatIsNotReported(t *testing.T) {
	now := time.Now()
	long, none := now.Add(-time.Minute), 0
	unknown := deploymentRow{Name: "b", Model: "m", Cost: 1, Mode: Full, Backend: backendKubernetes, CreatedAt: long, SeenAt: &long, Existing: &none}
	with := func(change func(*deploymentRow)) deploymentRow { s := unknown; change(&s); return s }
	for name, c := range map[string]struct {
		b      deploymentRow
		wanted map[string]int
		budget float64
		want   map[string]int
	}{
		"its number stays": {
			with(func(s *deploymentRow) { s.Desired, s.Registered = 4, 4 }), map[string]int{"a": 4, "b": 4}, 6, map[string]int{"a": 2, "b": 4},
		},
		"instances beyond its number count": {
			with(func(s *deploymentRow) { s.Registered, s.Draining = 2, 1 }), map[string]int{"a": 4, "b": 0}, 5, map[string]int{"a": 2, "b": 0},
		},
		"and starts that were ordered": {
			with(func(s *deploymentRow) { s.Ordered = 3 }), map[string]int{"a": 4}, 5, map[string]int{"a": 2, "b": 0},
		},
		"it does not grow beyond the budget": {
			with(func(s *deploymentRow) { s.Desired = 2 }), map[string]int{"a": 4, "b": 9}, 6, map[string]int{"a": 4, "b": 2},
		},
		"one that reports gives up its part": {
			with(func(s *deploymentRow) { s.Desired, s.Registered, s.SeenAt = 4, 4, &now }), map[string]int{"a": 4, "b": 4}, 6, map[string]int{"a": 3, "b": 3},
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := deploymentRow{Name: "a", Model: "m", Cost: 1, Mode: Full, Backend: backendKEDA, Desired: 4, Ready: 4}
			got := affordable(c.budget, c.wanted, []deploymentRow{a, c.b}, now)
			if !maps.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

// An instance that was told to stop makes room for another deployment soon, or not at all.
func TestRoomOfAnInstanceThatDoesNotGoIsNotWaitedFor(t *testing.T) {
	for name, c := range map[string]struct {
		ago   time.Duration
		frees bool
	}{"just named": {time.Second, true}, "four minutes": {4 * time.Minute, true}, "six minutes": {6 * time.Minute, false}} {
		t.Run(name, func(t *testing.T) {
			deployments := []applied{
				{deploymentRow: deploymentRow{Name: "new", Model: "m", Backend: backendLocal}},
				{deploymentRow: deploymentRow{
					Name: "old", Model: "m", Backend: backendLocal, Removing: []string{"a"},
					RemovingSince: map[string]time.Time{"a": noon.Add(-c.ago)},
				}},
			}
			if neighbours(deployments, noon); deployments[0].frees != c.frees {
				t.Errorf("room becomes free: %v, want %v", deployments[0].frees, c.frees)
			}
		})
	}
}

// stubborn is a cluster whose instances do not go.
type stubborn struct{ cluster }

func (s *stubborn) Apply(ctx context.Context, o Order) error {
	o.Remove = nil
	return s.cluster.Apply(ctx, o)
}

func TestAnInstanceThatDoesNotGoIsReported(t *testing.T) {
	db, c := driven(t), &stubborn{}
	w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: c}})}
	w.round()
	override(t, db, 1)
	for range 3 {
		w.round()
	}
	override(t, db, 0)
	for range 3 {
		w.round()
	}
	since := one[string](t, db, `SELECT removing_since->>removing[1] FROM penstock.deployment_state`)
	message := func() string { return one[string](t, db, `SELECT coalesce(error, '') FROM penstock.deployment_state`) }
	w.round()
	if again := one[string](t, db, `SELECT removing_since->>removing[1] FROM penstock.deployment_state`); again != since || message() != "" {
		t.Errorf("named for removal at %s and at %s: %q", since, again, message())
	}
	do(t, db, `UPDATE penstock.deployment_state
	              SET removing_since = jsonb_build_object(removing[1], clock_timestamp() - interval '6 minutes')`)
	w.round()
	if text := message(); !strings.Contains(text, "gpu-1 is to go since") {
		t.Errorf("the error is %q", text)
	}
	c.instances = nil
	w.round()
	w.round()
	if n := one[int](t, db, `SELECT cardinality(removing) + (removing_since <> '{}')::int FROM penstock.deployment_state`); n != 0 || message() != "" {
		t.Errorf("it is gone, and %d are left: %q", n, message())
	}
}

// divideAmong are the shares of deployments beside which nothing else runs.
func divideAmong(n int, deployments []deploymentRow, now time.Time) map[string]int {
	numbers, _ := shares(n, 0, deployments, modelStarts{}, now)
	return numbers
}
