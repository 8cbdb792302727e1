package backend

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"testing"
	"testing/synctest"
	"time"
)

// inBubble runs a test on virtual time, with a follower of two ready pods whose watch is open.
func inBubble(t *testing.T, test func(t *testing.T, f *follower)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := follow(t)
		defer f.stop()
		synctest.Wait()
		f.set("llama-0", "10.0.0.1")
		f.set("llama-1", "10.0.0.2")
		if got := f.list(); got != "llama-0 10.0.0.1:8000, llama-1 10.0.0.2:8000" {
			t.Fatalf("listed: %s", got)
		}
		synctest.Wait()
		if lists, watches := f.figures(); lists != 1 || watches != 1 {
			t.Fatalf("%d lists and %d watches", lists, watches)
		}
		test(t, f)
	})
}

// No list is read between a change and the answer that has it.
func TestAChangeOfAPodIsToldAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, f *follower) {
		began := time.Now()
		for _, step := range []struct {
			do   func()
			want string
		}{
			{func() { f.set("llama-2", "") }, "llama-0 10.0.0.1:8000, llama-1 10.0.0.2:8000, llama-2"},
			{
				func() { f.set("llama-2", "10.0.0.3") },
				"llama-0 10.0.0.1:8000, llama-1 10.0.0.2:8000, llama-2 10.0.0.3:8000",
			},
			{func() { f.remove("llama-0") }, "llama-1 10.0.0.2:8000, llama-2 10.0.0.3:8000"},
		} {
			step.do()
			f.told()
			if got := f.list(); got != step.want {
				t.Errorf("listed: %s, want %s", got, step.want)
			}
		}
		if took := time.Since(began); took > 3*tellPause {
			t.Errorf("three changes took %v", took)
		}
		if lists, watches := f.figures(); lists != 1 || watches != 1 {
			t.Errorf("%d lists and %d watches", lists, watches)
		}
	})
}

// A status that says nothing of the instance is told to nobody; many changes at once are one call.
func TestOnlyChangesOfInstancesAreTold(t *testing.T) {
	inBubble(t, func(t *testing.T, f *follower) {
		f.set("llama-0", "10.0.0.1")
		f.bookmark(150)
		time.Sleep(2 * tellPause)
		if n := len(f.changed); n != 0 {
			t.Errorf("told %d times of nothing", n)
		}
		for i := range 50 {
			f.set(fmt.Sprint("more-", i), "")
		}
		time.Sleep(2 * tellPause)
		if n := len(f.changed); n < 1 || n > 2 {
			t.Errorf("50 pods were told of %d times", n)
		}
		if got := f.list(); got != f.truth() {
			t.Errorf("listed: %s, want %s", got, f.truth())
		}
	})
}

func TestAWatchGoesOnWhereItsConnectionWasLost(t *testing.T) {
	for _, half := range []bool{false, true} {
		inBubble(t, func(t *testing.T, f *follower) {
			f.set("llama-2", "")
			f.told()
			f.lose(half)
			f.remove("llama-1") // while there is no connection
			f.told()
			if got := f.list(); got != f.truth() {
				t.Errorf("listed: %s, want %s", got, f.truth())
			}
			if lists, watches := f.figures(); lists != 1 || watches != 2 {
				t.Errorf("%d lists and %d watches", lists, watches)
			}
			if got := f.watched[1].Get("resourceVersion"); got != "103" {
				t.Errorf("it went on from version %s", got)
			}
		})
	}
}

// The server ends each watch after its time; the next one goes on from its last bookmark, whose version etcd still has.
func TestBookmarksKeepAWatchOfAQuietModelFromExpiring(t *testing.T) {
	inBubble(t, func(t *testing.T, f *follower) {
		f.forget()
		f.bookmark(f.version)
		time.Sleep(watchMax + time.Second)
		if _, watches := f.figures(); watches < 2 || len(f.changed) > 0 {
			t.Errorf("%d watches, and told %d times that the pods have to be listed", watches, len(f.changed))
		}
	})
}

func TestAnExpiredVersionIsFollowedByAList(t *testing.T) {
	expire := map[string]func(f *follower){
		"event": func(f *follower) {
			f.say(`{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}`)
		},
		"status": func(f *follower) { f.lose(false) },
	}
	for name, lose := range expire {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *follower) {
				f.configure(func() { f.stalled = true })
				f.remove("llama-1")
				f.forget() // the event with it
				f.configure(func() { f.stalled = false })
				lose(f)
				f.told()
				if got := f.list(); got != f.truth() {
					t.Errorf("listed: %s, want %s", got, f.truth())
				}
				time.Sleep(time.Second)
				f.set("llama-2", "10.0.0.3") // followed again
				f.told()
				if got := f.list(); got != f.truth() {
					t.Errorf("listed: %s, want %s", got, f.truth())
				}
				if lists, _ := f.figures(); lists != 2 {
					t.Errorf("%d lists", lists)
				}
			})
		})
	}
}

// A server that refuses watches is asked seldom, and no sooner than it says; each list is read meanwhile.
func TestARefusedWatchWaitsLongerEachTime(t *testing.T) {
	for _, status := range []int{
		http.StatusTooManyRequests, http.StatusForbidden, http.StatusServiceUnavailable, http.StatusGone,
	} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			inBubble(t, func(t *testing.T, f *follower) {
				f.configure(func() {
					for range 1000 {
						f.refuse = append(f.refuse, answer{status, "1"})
					}
				})
				f.lose(false)
				f.set("llama-1", "")
				for range 120 {
					time.Sleep(time.Second)
					if got := f.list(); got != f.truth() {
						t.Fatalf("listed: %s, want %s", got, f.truth())
					}
				}
				if _, watches := f.figures(); watches < 5 || watches > 20 {
					t.Errorf("%d watches in two minutes", watches)
				}
				f.configure(func() { f.refuse = []answer{{http.StatusTooManyRequests, "25"}} })
				_, before := f.figures()
				for watches := before; watches == before; _, watches = f.figures() {
					time.Sleep(time.Second)
					f.list()
				}
				time.Sleep(20 * time.Second)
				if _, watches := f.figures(); watches != before+1 {
					t.Errorf("asked again before the time that the server named")
				}
				for range 40 {
					time.Sleep(time.Second)
					f.list()
				}
				lists, _ := f.figures()
				f.list()
				f.list()
				if after, _ := f.figures(); after != lists {
					t.Error("lists are read although the server accepts watches again")
				}
			})
		})
	}
}

// The connection is open and nothing comes: a list finds what the watch did not tell.
func TestAStalledWatchIsFoundByAList(t *testing.T) {
	inBubble(t, func(t *testing.T, f *follower) {
		f.configure(func() { f.stalled = true })
		f.remove("llama-0")
		for began := time.Now(); f.list() != f.truth(); time.Sleep(time.Second) {
			if time.Since(began) > checkEvery {
				t.Fatalf("listed: %s, want %s", f.list(), f.truth())
			}
		}
		f.configure(func() { f.stalled = false })
		synctest.Wait()
		f.set("llama-1", "") // a watch was begun from that list
		f.told()
		if got := f.list(); got != f.truth() {
			t.Errorf("listed: %s, want %s", got, f.truth())
		}
	})
}

// Without any list, the watch itself ends where the server does not end it in its time.
func TestAWatchWithoutAnEndIsStalled(t *testing.T) {
	inBubble(t, func(t *testing.T, f *follower) {
		f.configure(func() { f.stalled = true })
		began := time.Now()
		f.told()
		if took := time.Since(began); took < watchMin || took > watchMax+watchGrace+time.Second {
			t.Errorf("found after %v", took)
		}
	})
}

func TestEventsThatCannotBeReadEndAWatch(t *testing.T) {
	for _, line := range []string{
		"{]\n", `{"type": 5}`,
		`{"type": "RENAMED", "object": {"metadata": {"name": "llama-0", "resourceVersion": "200"}}}`,
		`{"type": "ADDED", "object": {"metadata": {"name": "llama-0"}}}`, `{"type": "ADDED", "object": []}`,
		`{"type": "ERROR", "object": {"code": 500, "message": "etcd has no leader"}}`,
	} {
		inBubble(t, func(t *testing.T, f *follower) {
			f.say(line)
			f.told()
			if got := f.list(); got != f.truth() {
				t.Errorf("%s: listed: %s, want %s", line, got, f.truth())
			}
			if lists, _ := f.figures(); lists != 2 {
				t.Errorf("%s: %d lists", line, lists)
			}
		})
	}
}

// A pod of a StatefulSet comes again under its name. The end of the one before may be sent late, or twice.
func TestTheEndOfAPodBeforeIsNotThatOfTheNextOne(t *testing.T) {
	inBubble(t, func(t *testing.T, f *follower) {
		f.configure(func() { f.twice = true })
		f.remove("llama-0")
		f.set("llama-0", "10.0.0.9")
		f.say(fmt.Sprintf(`{"type": "DELETED", "object": {"metadata":
			{"name": "llama-0", "uid": "uid-101", "resourceVersion": "%d"}}}`, f.version))
		f.told()
		time.Sleep(time.Second)
		if got := f.list(); got != f.truth() {
			t.Errorf("listed: %s, want %s", got, f.truth())
		}
		if lists, watches := f.figures(); lists != 1 || watches != 1 {
			t.Errorf("%d lists and %d watches", lists, watches)
		}
	})
}

func TestAListAfterAnOrderIsRead(t *testing.T) {
	inBubble(t, func(t *testing.T, f *follower) {
		if err := f.k.Apply(t.Context(), f.order(3)); err != nil {
			t.Fatal(err)
		}
		f.list()
		if lists, watches := f.figures(); lists != 2 || watches != 1 {
			t.Errorf("%d lists and %d watches", lists, watches)
		}
	})
}

// A deployment that has no pods and is to have none has no watch; its first order begins one.
func TestADeploymentAtZeroIsNotWatched(t *testing.T) {
	inBubble(t, func(t *testing.T, f *follower) {
		f.remove("llama-0")
		f.remove("llama-1")
		if err := f.k.Apply(t.Context(), f.order(0)); err != nil {
			t.Fatal(err)
		}
		f.list()
		_, before := f.figures()
		for range 120 {
			time.Sleep(time.Second)
			f.list()
		}
		if _, watches := f.figures(); watches != before {
			t.Errorf("%d watches of no pods", watches-before)
		}
		if err := f.k.Apply(t.Context(), f.order(1)); err != nil {
			t.Fatal(err)
		}
		f.list()
		synctest.Wait()
		for len(f.changed) > 0 {
			<-f.changed
		}
		f.set("llama-5", "10.0.0.5")
		f.told()
		if got := f.list(); got != f.truth() {
			t.Errorf("listed: %s, want %s", got, f.truth())
		}
	})
}

// Whatever went wrong, List returns what there is soon after: no fault makes it wrong for longer than checkEvery.
func TestAfterAnyFaultsTheListIsRight(t *testing.T) {
	for seed := range uint64(50) {
		inBubble(t, func(t *testing.T, f *follower) {
			random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // the same each time
			faults := []func(){
				func() { f.lose(false) },
				func() { f.lose(true) },
				f.forget,
				func() { f.configure(func() { f.twice = !f.twice }) },
				func() { f.configure(func() { f.stalled = !f.stalled }) },
				func() { f.configure(func() { f.refuse = append(f.refuse, answer{http.StatusTooManyRequests, "3"}) }) },
				func() {
					f.configure(func() { f.refuse = append(f.refuse, answer{http.StatusInternalServerError, ""}) })
				},
				func() {
					f.say(`{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}`)
				},
				func() { f.say("{]") },
			}
			wrong := time.Time{}
			for range 300 {
				switch name := fmt.Sprint("llama-", random.IntN(5)); random.IntN(8) {
				case 0:
					faults[random.IntN(len(faults))]()
				case 1, 2:
					f.set(name, "")
				case 3:
					f.set(name, fmt.Sprint("10.0.1.", random.IntN(9)))
				case 4:
					f.remove(name)
				}
				time.Sleep(time.Duration(random.IntN(1500)) * time.Millisecond)
				synctest.Wait()
				switch got := f.list(); {
				case got == f.truth():
					wrong = time.Time{}
				case wrong.IsZero():
					wrong = time.Now()
				case time.Since(wrong) > checkEvery+time.Second:
					t.Fatalf("seed %d: listed: %s, want %s", seed, got, f.truth())
				}
			}
		})
	}
}

// A server that asks to wait is not asked by any call before, for at most half a minute.
func TestAServerThatAsksToWaitIsNotAsked(t *testing.T) {
	for _, status := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable} {
		inBubble(t, func(t *testing.T, f *follower) {
			refused := func(wait time.Duration) {
				t.Helper()
				var told interface{ RetryAfter() time.Duration }
				if err := f.k.Apply(t.Context(), f.order(3)); !errors.As(err, &told) || told.RetryAfter() != wait {
					t.Errorf("the error of an order is %v", err)
				}
				if _, _, err := f.k.pods(t.Context(), KubernetesTarget{Namespace: "models", Selector: "app=llama"}); !errors.As(err, &told) || told.RetryAfter() != wait {
					t.Errorf("the error of a list is %v", err)
				}
			}
			f.configure(func() { f.busy = answer{status, "7"} })
			refused(7 * time.Second)
			asked := f.requests()
			for range 6 {
				time.Sleep(time.Second)
				refused(7 * time.Second)
			}
			if n := f.requests() - asked; n != 0 {
				t.Errorf("the server was asked %d times within 7 s", n)
			}
			f.configure(func() { f.busy.after = "86400" })
			time.Sleep(2 * time.Second)
			refused(retryMax)
			f.configure(func() { f.busy = answer{} })
			refused(retryMax)
			time.Sleep(retryMax)
			if got := f.list(); got != f.truth() {
				t.Errorf("half a minute after it asked for a day: %s, want %s", got, f.truth())
			}
		})
	}
}
