# Sourced by bash, before anything that has inductor link C++: `source bench/shared_libstdcxx.sh`.
#
# Where the compiler links libstdc++.a into an AOTInductor package (an installation without the .so, or
# one that says -static-libstdc++), the package's std::regex meets the facets of the process's own
# libstdc++.so.6 and crashes: seen on the lent H200, parse_device_str, signal 11, with one nn.Linear and
# no attnplug. This puts a compiler in front that names the shared library before the archive's turn.
_shared=/tmp/attnplug-libstdcxx
[ "${CXX:-}" != "$_shared/g++" ] || return 0 # sourced before
mkdir -p "$_shared"
_library="$(ldconfig -p | awk '/libstdc\+\+\.so\.6 .*x86-64/ {print $NF; exit}')"
cat >"$_shared/g++" <<END
#!/bin/sh
for word; do case \$word in -c | -S | -E) exec ${CXX:-$(command -v g++)} "\$@" ;; esac; done
exec ${CXX:-$(command -v g++)} "\$@" -Wl,--no-as-needed $_library
END
chmod +x "$_shared/g++"
export PATH="$_shared:$PATH" CXX="$_shared/g++"
