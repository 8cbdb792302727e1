// Package config reads what a program is told: defaults, then a file, then the environment, then flags; the later
// one wins. A key that nobody knows is an error, wherever it stands.
//
// A program's options are the fields of a struct, with their defaults in it:
//
//	type Config struct {
//		Database config.Database `koanf:"database"`
//		Leader   struct {
//			Listen string `koanf:"listen" help:"address of the HTTP server"`
//		} `koanf:"leader"`
//	}
//
// The key leader.listen is --listen among the flags of the program named leader, PENSTOCK_LEADER_LISTEN in the
// environment, and listen below leader in the file. A section that is not named after a program is for all of them.
// So one file and one environment serve all programs: what is in another program's section is left to that program.
package config
