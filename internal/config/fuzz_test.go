package config_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/penstock/penstock/internal/config"
)

// Whatever stands in a file or a variable, reading ends with values or an error.
func FuzzLoad(f *testing.F) {
	f.Add("leader: {listen: ':2', pause: 2s, some_names: [b, c], share: 0.5}", "3s")
	f.Add("leader: [", "-1ns")
	f.Add("leader: {pause: 10}\ndatabase: &a {url: *a}", "1e9h")
	f.Fuzz(func(t *testing.T, text, pause string) {
		path := filepath.Join(t.TempDir(), "penstock.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s := defaults()
		_ = config.Load(config.Program{
			Name: "leader", Args: []string{"--config", path}, Environ: []string{"PENSTOCK_LEADER_PAUSE=" + pause},
		}, &s) // an error is an answer
	})
}
