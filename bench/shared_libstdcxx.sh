# Sourced by bash, before anything that has inductor link C++: `source bench/shared_libstdcxx.sh`.
#
# Where the compiler links libstdc++.a into an AOTInductor package (an installation without the .so, or
# one that says -static-libstdc++), the package's std::regex meets the facets of the process's own
# libstdc++.so.6 and crashes: seen on the lent H200, parse_device_str, signal 11, with one nn.Linear and
# no attnplug. CXX, which inductor asks first, becomes a compiler that names the shared library before
# the archive's turn. PATH stays as it is: the lent machine's own CXX calls the g++ that it finds there.
_shared=/tmp/attnplug-cxx
[ "${CXX:-}" != "$_shared" ] || return 0 # sourced before
_library="$(ldconfig -p | awk '/libstdc\+\+\.so\.6 .*x86-64/ {print $NF; exit}')"
cat >"$_shared" <<END
#!/bin/sh
for word; do case \$word in -shared) set -- "\$@" -x none -Wl,--no-as-needed $_library ;; esac; done
exec ${CXX:-$(command -v g++)} "\$@"
END
chmod +x "$_shared"
export CXX="$_shared"
